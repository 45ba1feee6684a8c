// Products of bf16 pairs, and conversion of words of e4m3 codes to bf16 pairs. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/fp8_word.h"

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

// Returns the two pairs of a word of e4m3 codes (kernels/fp8_word.h), the first column of each in the lower
// half: exact, subnormal codes too. A NaN code gives +-480.
__device__ __forceinline__ uint2 fp8_word_to_bf16(uint32_t word) {
  constexpr uint32_t kTwoTo120 = 0x7b807b80u;
  const uint32_t second = (word << 4 & kFp8SecondLeft) | (word >> 4 & kFp8SecondRight);
  return {bf16x2_mul(word & kFp8FirstPair, kTwoTo120), bf16x2_mul(second, kTwoTo120)};
}

}  // namespace fp4moe
