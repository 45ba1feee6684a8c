// The softmax of a tile of logits in the registers of a prefill consumer: masks, weights, and their rounding.
// A thread (g, q) = (lane / 4, lane % 4) has columns 8 n + 2 q + j of rows g + 8 i of its warp's 16 rows at
// s[4 n + 2 i + j]. Device code only.
#pragma once

#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/ptx/attention_ptx.cuh"

namespace fp4moe::cuda {

// Sets the logits of keys outside a row's range to -infinity.
template <int kKeys>
__device__ __forceinline__ void mask(const AttentionParams& p, const int (&position)[2], int first_key,
                                     float (&s)[kKeys / 2]) {
  const int first = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int last = position[i] - first, begin = p.window > 0 ? last - p.window + 1 : INT32_MIN;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (8 * n + j > last || 8 * n + j < begin) s[4 * n + 2 * i + j] = -INFINITY;
  }
}

// A thread's sums of its two rows: of weights 2^(scale_log2 * (logit - base)).
struct Sums {
  float base[2], denominator[2];  // base: about the largest logit so far; -infinity: no key yet
};

// Turns logits into weights in place. rescale: the factors for the sums so far. A row's base moves to its
// largest logit only when a weight would exceed 2^kSlack, so that most factors are 1.
template <int kKeys, float kSlack>
__device__ __forceinline__ void weigh(float scale_log2, float (&s)[kKeys / 2], Sums& sums,
                                      float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float part[4];  // keeps chains of dependent operations short
#pragma unroll
    for (int j = 0; j < 4; ++j) part[j] = sums.base[i];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) part[n % 2 * 2 + j] = fmaxf(part[n % 2 * 2 + j], s[4 * n + 2 * i + j]);
    float most = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if constexpr (kSlack > 0)
      if (!((most - sums.base[i]) * scale_log2 > kSlack)) most = sums.base[i];
    const float base = most == -INFINITY ? 0 : most;  // no key of the row yet: all weights are 0
    const float origin = base * scale_log2;
    rescale[i] = ex2((sums.base[i] - base) * scale_log2);  // exactly 1 if the base stays
    sums.base[i] = most;
#pragma unroll
    for (int j = 0; j < 4; ++j) part[j] = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[4 * n + 2 * i + j];
        x = ex2(fmaf(x, scale_log2, -origin));
        part[n % 2 * 2 + j] += x;
      }
    const float sum = (part[0] + part[1]) + (part[2] + part[3]);
    sums.denominator[i] = sums.denominator[i] * rescale[i] + sum;
  }
}

template <int kKeys>
__device__ __forceinline__ void round_weights(const float (&s)[kKeys / 2],
                                              uint32_t (&weights)[kKeys / 16][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = ptx::bf16_pair(s[2 * i], s[2 * i + 1]);
}

}  // namespace fp4moe::cuda
