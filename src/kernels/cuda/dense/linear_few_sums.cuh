// The rows of x in shared memory for linear_few.cu, if the norm's input is a fused sum. Device code only.
#pragma once

#include "kernels/cuda/comm/fused_sums.cuh"
#include "kernels/cuda/dense/linear_few_norm.cuh"

namespace fp4moe::few_linear {

// The norm's weights, [K] f32 in shared memory after the layout's end, because load_taken() needs the
// registers: each thread loads the vectors that it will use, before the grid dependency wait.
struct SharedNormWeights {
  float4* weights;
  Share own;  // vectors of a row that this block stores to SumsToTake::out
  __device__ SharedNormWeights(const FewArgs& a, uint8_t* shared)
      : weights(reinterpret_cast<float4*>(shared + taken_weights_offset(a.layout))),
        own(a.k / 4, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)) {
    for (int i = static_cast<int>(threadIdx.x); i < a.k / 4; i += kThreads)
      weights[i] = __ldg(reinterpret_cast<const float4*>(a.norm_weight) + i);
  }
};

// Vectors that a thread takes at once: more would need more registers than leave room for attention, the next
// kernel.
constexpr int kTakenLoads = 3;

// load_normed() for rows that are the residual plus the taken sums, with the same bits. Each block takes all
// rows, and stores its share of them to `out`. Bytes per block: T K (4 + 4 R) from the L2.
__device__ inline void load_taken(const FewArgs& a, const SharedNormWeights& norm, cuda::SumTaker& taker,
                                  float* out, uint8_t* shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, vectors = a.k / 4;
  float* squares = reinterpret_cast<float*>(shared + a.layout.squares);
  for (int t = 0; t < a.num_tokens; ++t) {
    const float4* residual = reinterpret_cast<const float4*>(a.residual) + t * vectors;
    float4* new_residual = reinterpret_cast<float4*>(out) + t * vectors;
    uint2* x = reinterpret_cast<uint2*>(shared + a.layout.x + t * a.layout.x_pitch);
    float sum = 0;
    for (int begin = thread; begin < vectors; begin += kTakenLoads * kThreads) {
      float4 v[kTakenLoads];
#pragma unroll
      for (int j = 0; j < kTakenLoads; ++j) {
        const int i = begin + j * kThreads;
        v[j] = i < vectors ? __ldcg(residual + i) : float4{};
      }
      taker.take<kTakenLoads>(
          [&](int j) { return begin + j * kThreads < vectors ? t * vectors + begin + j * kThreads : -1; },
          [&](int j, const float4& s) { v[j].x += s.x, v[j].y += s.y, v[j].z += s.z, v[j].w += s.w; });
#pragma unroll
      for (int j = 0; j < kTakenLoads; ++j) {
        sum += square_of(v[j]);
        const int i = begin + j * kThreads;
        if (i >= vectors) continue;
        x[i] = bf16_products(v[j], norm.weights[i]);
        if (i >= norm.own.begin && i < norm.own.end) new_residual[i] = v[j];
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) squares[warp * kMaxTokens + t] = sum;
  }
  taker.clear_previous();  // in threads without vectors
  ptx::named_barrier(kMultiplyBarrier, kThreads);
}

}  // namespace fp4moe::few_linear
