// mma.sync m16n8k16 of bf16 into f32 (PTX ISA, "mma.m16n8k16"), and conversions to bf16 pairs. Device code
// only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fp4moe::ptx {

// Computes c [16, 8] += a [16, 16] b [16, 8]. With lane = 4 g + t: a holds rows g, g+8 (0, 1) and again (2,
// 3), of which (0, 1) are one pair of k and (2, 3) another; b holds the same two pairs of k, column g; c
// holds row g (0, 1) and g+8 (2, 3), columns 2t and 2t+1. Which k a pair stands for is free, as long as a and
// b agree.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Computes c [16, 8] += a [16, 8] b [8, 8] of tf32 (PTX ISA, "mma.m16n8k8"). With lane = 4 g + t: a holds
// rows g, g+8 of k = t, then of k = t + 4; b column g of the same; c as in mma_bf16.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds both to nearest even; `low` is in the lower half.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float low_of_pair(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of_pair(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// x = high + low up to 2^-17 of x: the sum of three products, high high + high low + low high, is nearly
// f32's.
struct SplitPair {
  uint32_t high, low;
};
__device__ __forceinline__ SplitPair split_pair(float x, float y) {
  const uint32_t high = bf16_pair(x, y);
  return {high, bf16_pair(x - low_of_pair(high), y - high_of_pair(high))};
}

// Loads four 8 x 8 matrices of bf16: lane 8 i + j has the shared address of the 16 bytes of row j of matrix
// i; lane 4 g + t gets elements (g, 2 t) and (g, 2 t + 1) of matrix i in m[i]; transposed: (2 t, g) and
// (2 t + 1, g).
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace fp4moe::ptx
