// The arguments of linear_few.cu's kernel, and the RMS norm inside it. Device code only.
#pragma once

#include "kernels/cuda/dense/linear_few_layout.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/ops.h"

namespace fp4moe::few_linear {

// Named barriers.
constexpr int kMultiplyBarrier = 1;  // for the warps that multiply
constexpr int kClearedBarrier = 2;   // for all warps

struct FewArgs {
  const uint8_t* weight;     // [n, k], bf16 or e4m3
  Fp8LinearView fp8;         // FP8: the scales
  const float* bias;         // [n] or null
  const bf16* x;             // [num_tokens, k]; with a norm: null
  const float* residual;     // [num_tokens, k]: with a norm
  const float* norm_weight;  // [k]
  float* out;                // [num_tokens, n]
  float eps;
  int num_tokens, n, k;
  FewLayout layout;
  bool accumulate;
};

// In a pass of load_normed: the vectors that a thread loads per token, and the number of tokens.
constexpr int kLoads = 4, kTokensAtOnce = 2;

// The norm's weights that a thread needs first: loaded before the grid dependency wait.
struct NormWeights {
  float4 first[kLoads];
  __device__ explicit NormWeights(const FewArgs& a) {
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
//   vector   0 ... 255   256 ... 511   512 ... 767   768 ... 1023   1024 ... 1279
//   thread   0 ... 255   0 ... 255     0 ... 255     0 ... 255      0 ... 255
//   load j   0           1             2             3              0
//   pass     0           0             0             0              1
//
// All loads of a pass are issued before the first is used: 2 x 4 of the residual and 4 of the weights, which
// are already in `weights` for pass 0.
__device__ inline void load_normed(const FewArgs& a, const NormWeights& weights, uint8_t* shared) {
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

}  // namespace fp4moe::few_linear
