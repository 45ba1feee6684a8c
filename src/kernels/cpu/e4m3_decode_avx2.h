// Decoding of e4m3 codes in AVX2.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Eight codes in 16-bit lanes. Precondition: no code is NaN. A code, placed in a half's sign, low exponent
// and high fraction bits, is its value times 2^-8.
inline __m256 finite_e4m3(__m128i codes) {
  const __m128i halves = _mm_srai_epi16(_mm_slli_epi16(codes, 8), 1);
  const __m256 small = _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(int16_t(0xbfff))));
  return _mm256_mul_ps(small, _mm256_set1_ps(256.0f));
}

inline __m256 any_e4m3(__m128i codes) {
  const __m128i magnitudes = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  const __m128i nan = _mm_cmpeq_epi16(magnitudes, _mm_set1_epi16(0x7f));
  return _mm256_or_ps(finite_e4m3(codes), _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)));
}

// Loads the first min(n, 16) codes; the other lanes are 0. NaN codes become NaN.
inline Vec load_e4m3(const uint8_t* p, int64_t n) {
  alignas(16) uint8_t buffer[16] = {};
  const bool whole = n >= 16;
  for (int i = 0; !whole && i < n; ++i) buffer[i] = p[i];
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(whole ? p : buffer));
  return {any_e4m3(_mm_cvtepu8_epi16(codes)), any_e4m3(_mm_cvtepu8_epi16(_mm_srli_si128(codes, 8)))};
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
