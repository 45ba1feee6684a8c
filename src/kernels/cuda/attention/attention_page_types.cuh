// The types of KV pages for decode's attention: elements in memory, and as operands of mma.sync. Device code
// only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx/ptx_e4m3.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"

namespace fp4moe::cuda {

// bf16 elements, multiplied as they are.
struct Bf16Pages {
  using Chunk = uint4;                   // 8 elements
  static constexpr int kBytes = 2;       // of an element
  static constexpr int kBlockKeys = 16;  // keys that a warp processes at once
  // Which piece of a row in shared memory a key's piece is swapped with: eight lanes read at once, four
  // pieces of two adjacent keys.
  static constexpr int key_swizzle(int key) { return key % 2 * 4; }

  __device__ __forceinline__ static uint32_t pair(float low, float high) { return ptx::bf16_pair(low, high); }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
  __device__ __forceinline__ static Chunk pack(const float (&x)[8], float /*inverse*/) {
    return {pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5]), pair(x[6], x[7])};
  }
  // Sets pairs[i] to the elements 2 i and 2 i + 1.
  __device__ __forceinline__ static void unpack(const Chunk& x, uint32_t (&pairs)[4]) {
    pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
  }
  // Sets pairs[j] to element j of a and of b.
  __device__ __forceinline__ static void zip(const Chunk& a, const Chunk& b, uint32_t (&pairs)[8]) {
    const uint32_t from_a[] = {a.x, a.y, a.z, a.w}, from_b[] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      pairs[j] = __byte_perm(from_a[j / 2], from_b[j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
  }
};

// E4M3 codes, converted to f16 in registers, which is exact. A block has twice as many keys, so that it has
// the same number of bytes.
struct E4m3Pages {
  using Chunk = uint2;
  static constexpr int kBytes = 1;
  static constexpr int kBlockKeys = 32;
  // Sixteen lanes read at once, two pieces of four adjacent keys.
  static constexpr int key_swizzle(int key) { return key % 4 * 2; }

  __device__ __forceinline__ static uint32_t pair(float low, float high) { return ptx::f16_pair(low, high); }
  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    ptx::mma_f16(c, a, b0, b1);
  }
  __device__ __forceinline__ static uint32_t four_codes(const float* x, float inverse) {
    return ptx::e4m3_word(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
  }
  __device__ __forceinline__ static Chunk pack(const float (&x)[8], float inverse) {
    return {four_codes(x, inverse), four_codes(x + 4, inverse)};
  }
  __device__ __forceinline__ static void unpack(const Chunk& x, uint32_t (&pairs)[4]) {
    ptx::widen(x.x, pairs[0], pairs[1]);
    ptx::widen(x.y, pairs[2], pairs[3]);
  }
  __device__ __forceinline__ static void zip(const Chunk& a, const Chunk& b, uint32_t (&pairs)[8]) {
    ptx::widen(__byte_perm(a.x, b.x, 0x5140), pairs[0], pairs[1]);
    ptx::widen(__byte_perm(a.x, b.x, 0x7362), pairs[2], pairs[3]);
    ptx::widen(__byte_perm(a.y, b.y, 0x5140), pairs[4], pairs[5]);
    ptx::widen(__byte_perm(a.y, b.y, 0x7362), pairs[6], pairs[7]);
  }
};

}  // namespace fp4moe::cuda
