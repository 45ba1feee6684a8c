// The arguments of linear_few.cu's kernel, and the rows of x in shared memory, with or without the RMS norm
// (experts/linear_few_tiles.cu has the same rows and barriers). Device code only.
#pragma once

#include "kernels/cuda/dense/linear_few_layout.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/device_comm.h"
#include "kernels/ops.h"

namespace fp4moe::few_linear {

// Named barriers.
constexpr int kMultiplyBarrier = 1;  // for the warps that multiply
constexpr int kClearedBarrier = 2;   // for all warps

// What a linear layer for few tokens reads besides its weights, and writes.
struct FewTokens {
  const float* bias;         // [n] or null
  const bf16* x;             // [num_tokens, k]; with a norm: null
  const float* residual;     // [num_tokens, k]: with a norm
  const float* norm_weight;  // [k]
  float* out;                // [num_tokens, n]
  float eps;
  int num_tokens, n, k;
};

struct FewArgs : FewTokens {
  const uint8_t* weight;  // [n, k], bf16 or e4m3
  Fp8LinearView fp8;      // FP8: the scales
  FewLayout layout;
  PartialPeers peers;  // of out; none with the norm
  bool accumulate;
};

// Loads x, with one bulk copy per token.
template <class Args>
__device__ void load_x(const Args& a, uint8_t* shared, uint64_t* barrier) {
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(a.num_tokens * a.k * 2));
  if (t < 32) __syncwarp();
  if (t < a.num_tokens)
    ptx::bulk_load(shared + a.layout.x + t * a.layout.x_pitch, a.x + static_cast<int64_t>(t) * a.k,
                   static_cast<uint32_t>(a.k) * 2, barrier);
  ptx::mbarrier_wait(barrier, 0);
}

// In a pass of load_normed: the vectors that a thread loads per token, and the number of tokens.
constexpr int kLoads = 4, kTokensAtOnce = 2;

// The norm's weights that a thread needs first: loaded before the grid dependency wait.
struct NormWeights {
  float4 first[kLoads];
  template <class Args>
  __device__ explicit NormWeights(const Args& a) {
    const float4* weight = reinterpret_cast<const float4*>(a.norm_weight);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      first[j] = i < a.k / 4 ? __ldg(weight + i) : float4{};
    }
  }
};

__device__ __forceinline__ float square_of(const float4& v) {
  return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}
__device__ __forceinline__ uint2 bf16_products(const float4& v, const float4& w) {
  return {ptx::bf16_pair(v.x * w.x, v.y * w.y), ptx::bf16_pair(v.z * w.z, v.w * w.w)};
}

// Computes x = bf16(residual * weight) in shared memory and each warp's part of the sum of squares. A row is
// K / 4 vectors of four floats, which the kThreads threads process in passes of kLoads vectors each, for
// kTokensAtOnce tokens that share the weights:
//
//   vector   0 ... 255   256 ... 511   512 ... 767   768 ... 1023
//   thread   0 ... 255   0 ... 255     0 ... 255     0 ... 255
//   load j   0           1             2             3
//   pass     0           0             0             0
//
// All loads of a pass are issued before the first is used: 2 x 4 of the residual and 4 of the weights, which
// are already in `weights` for pass 0.
template <class Args>
__device__ void load_normed(const Args& a, const NormWeights& weights, uint8_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, vectors = a.k / 4;
  float* squares = reinterpret_cast<float*>(shared + a.layout.squares);
  const float4* weight = reinterpret_cast<const float4*>(a.norm_weight);
  const float4* residual = reinterpret_cast<const float4*>(a.residual);
  for (int first = 0; first < a.num_tokens; first += kTokensAtOnce) {
    float sums[kTokensAtOnce] = {};
    for (int begin = thread; begin < vectors; begin += kLoads * kThreads) {
      float4 v[kTokensAtOnce][kLoads], w[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int i = begin + j * kThreads;
        w[j] = begin == thread ? weights.first[j] : i < vectors ? __ldg(weight + i) : float4{};
#pragma unroll
        for (int t = 0; t < kTokensAtOnce; ++t)
          v[t][j] = i < vectors && first + t < a.num_tokens
                        ? __ldcg(residual + static_cast<int64_t>(first + t) * vectors + i)
                        : float4{};
      }
#pragma unroll
      for (int t = 0; t < kTokensAtOnce; ++t) {
        if (first + t >= a.num_tokens) break;
        uint2* x = reinterpret_cast<uint2*>(shared + a.layout.x + (first + t) * a.layout.x_pitch);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          sums[t] += square_of(v[t][j]);
          if (const int i = begin + j * kThreads; i < vectors) x[i] = bf16_products(v[t][j], w[j]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokensAtOnce; ++t) {
      for (int offset = 16; offset > 0; offset /= 2) sums[t] += __shfl_xor_sync(~0u, sums[t], offset);
      if (lane == 0 && first + t < a.num_tokens) squares[warp * kMaxTokens + first + t] = sums[t];
    }
  }
  ptx::named_barrier(kMultiplyBarrier, kThreads);
}

// Returns 1 / rms of token t from the warps' sums of squares.
template <class Args>
__device__ __forceinline__ float inverse_rms(const Args& a, const uint8_t* shared, int t) {
  const float* squares = reinterpret_cast<const float*>(shared + a.layout.squares);
  float square = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) square += squares[warp * kMaxTokens + t];
  return 1 / sqrtf(square / static_cast<float>(a.k) + a.eps);
}

}  // namespace fp4moe::few_linear
