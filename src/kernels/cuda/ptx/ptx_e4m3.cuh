// Conversions between f32, e4m3 and f16, and mma.sync m16n8k16 of f16 into f32. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4moe::ptx {

// Rounds both to e4m3 as e4m3_encode() does (formats/e4m3.h); `low` is in the lower byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// The same for four values; the first is in the lowest byte.
__device__ __forceinline__ uint32_t e4m3_word(float x, float y, float z, float w) {
  return e4m3_pair(x, y) | e4m3_pair(z, w) << 16;
}

// Converts four e4m3 bytes to f16, exactly: the first two to `first` and the last two to `last`.
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& first, uint32_t& last) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(first), "=r"(last)
      : "r"(bytes));
}

// Rounds both to nearest even; `low` is in the lower half.
__device__ __forceinline__ uint32_t f16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Converts a pair of f16 to a pair of bf16.
__device__ __forceinline__ uint32_t bf16_of_f16_pair(uint32_t pair) {
  uint32_t out;
  asm("{.reg .b16 low, high; .reg .f32 x, y; mov.b32 {low, high}, %1; cvt.f32.f16 x, low; "
      "cvt.f32.f16 y, high; cvt.rn.bf16x2.f32 %0, y, x;}"
      : "=r"(out)
      : "r"(pair));
  return out;
}

// c [16, 8] += a [16, 16] b [16, 8] for f16 operands with f32 sums; otherwise like mma_bf16().
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fp4moe::ptx
