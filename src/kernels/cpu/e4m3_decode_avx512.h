// Decoding of e4m3 codes in AVX-512.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Precondition: no code is NaN. A code, placed in a half's sign, low exponent and high fraction bits, is its
// value times 2^-8.
inline __m512 finite_e4m3(__m128i codes) {
  const __m256i halves = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8), 1);
  const __m512 small = _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(int16_t(0xbfff))));
  return _mm512_mul_ps(small, _mm512_set1_ps(256.0f));
}

// Loads the first min(n, 16) codes; the other lanes are 0. NaN codes become NaN.
inline Vec load_e4m3(const uint8_t* p, int64_t n) {
  const __m128i codes = _mm_maskz_loadu_epi8(first_lanes(n), p);
  const __m128i magnitudes = _mm_and_si128(codes, _mm_set1_epi8(0x7f));
  const __mmask16 nan = _mm_cmpeq_epi8_mask(magnitudes, _mm_set1_epi8(0x7f));
  return {_mm512_mask_mov_ps(finite_e4m3(codes), nan, _mm512_set1_ps(__builtin_nanf("")))};
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
