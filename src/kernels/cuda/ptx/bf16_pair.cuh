// Products of bf16 pairs, and conversion of e4m3 codes to bf16 pairs. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4moe {

__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}

// Returns the values of the two codes in bytes kFirst and kFirst + 1 of `codes`, the first in the lower half:
// exact. Exponent and fraction of a code are moved to those of a bf16, which is then 2^120 times too small
// (subnormal codes too). A NaN code gives +-480.
template <int kFirst>
__device__ __forceinline__ uint32_t e4m3_pair_to_bf16(uint32_t codes) {
  const uint32_t halves =
      __byte_perm(codes, 0, 0x1404 + kFirst * 0x1010);  // codes in the halves' upper bytes
  return bf16x2_mul((halves >> 4 & 0x07f007f0u) | (halves & 0x80008000u), 0x7b807b80u);
}

}  // namespace fp4moe
