// Rope inside decode's attention: the rotations for a position, and a row's own key and value, which are
// stored in their page.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention/attention_page_types.cuh"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/ptx/block_norm.cuh"

namespace fp4moe::cuda {

struct Turn {
  float cosine, sine;
};

// Rotates an element and its partner, which is half of the rotary dims further.
__device__ __forceinline__ void turn(float& low, float& high, const Turn& by) {
  const float x = low;
  low = x * by.cosine - high * by.sine;
  high = high * by.cosine + x * by.sine;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Whether heads of D elements can be rotated as a whole, or in their first 2 kPartHalf dims.
template <int D>
constexpr bool kRotatesAll = D <= 128;
template <int D>
constexpr bool kRotatesPart = D >= 128;
constexpr int kPartHalf = 32;

// The row's own key and value, for heads of D elements: each lane has the chunks that it would multiply if
// the key were in its fragment.
template <class P, int D>
struct NewToken {
  float k[D / 32][8], v[D / 64][8];
  typename P::Chunk key[D / 32], value[D / 64];

  __device__ __forceinline__ static int key_dim(int c) {
    return (4 * c + static_cast<int>(threadIdx.x) % 4) * 8;
  }
  __device__ __forceinline__ static int value_dim(int c) {
    return (8 * c + static_cast<int>(threadIdx.x) % 32 / 4) * 8;
  }
  __device__ __forceinline__ static void load_8(const float* from, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = __ldcg(reinterpret_cast<const float2*>(from + i));
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ void load(const AttentionParams& p, int row, int kv_head) {
    const float* of_k = p.rope.k + row * p.rope.stride + static_cast<int64_t>(kv_head) * D;
    const float* of_v = p.rope.v + row * p.rope.stride + static_cast<int64_t>(kv_head) * D;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) load_8(of_k + key_dim(c), k[c]);
#pragma unroll
    for (int c = 0; c < D / 64; ++c) load_8(of_v + value_dim(c), v[c]);
  }
  // Norms the key. weights: [D], in shared memory.
  __device__ __forceinline__ void norm(const float* weights, float eps) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += k[c][i] * k[c][i];
    const float inverse = inverse_rms(quad_sum(sum), D, eps);
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i) k[c][i] *= inverse * weights[key_dim(c) + i];
  }
  // kHalf: half of the rotary dims, a multiple of 32.
  template <int kHalf>
  __device__ __forceinline__ void rotate(const Turn* turns) {
#pragma unroll
    for (int c = 0; c < kHalf / 32; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i) turn(k[c][i], k[c + kHalf / 32][i], turns[key_dim(c) + i]);
  }
  // Rotates the key; the lanes that multiply key `place` of a block store the key and the value in their
  // page.
  __device__ __forceinline__ void put(const AttentionParams& p, int place, int page_row, const Turn* turns) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (!kRotatesAll<D>)
      rotate<kPartHalf>(turns);
    else if (p.rope.half == D / 2)
      rotate<D / 2>(turns);
    else if constexpr (kRotatesPart<D>)
      rotate<kPartHalf>(turns);
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      key[c] = P::pack(k[c], p.k_inverse);
      if (lane / 4 == place % 8) store(p.k, static_cast<int64_t>(page_row) * p.k_stride + key_dim(c), key[c]);
    }
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      value[c] = P::pack(v[c], p.v_inverse);
      if (lane % 4 == place % 8 / 2)
        store(p.v, static_cast<int64_t>(page_row) * p.v_stride + value_dim(c), value[c]);
    }
  }

 private:
  // at: in elements.
  __device__ __forceinline__ static void store(uint8_t* pages, int64_t at, const typename P::Chunk& chunk) {
    *reinterpret_cast<typename P::Chunk*>(pages + at * P::kBytes) = chunk;
  }
};

}  // namespace fp4moe::cuda
