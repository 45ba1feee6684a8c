// Decoding for expert_dot_f32.h, in AVX2.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/e4m3_decode_avx2.h"
#include "kernels/cpu/expert_panel.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kMaxTokens = 6;  // with two sums per token, 12 of 16 registers hold sums

template <Fp4Format F>
inline __m256 half_block_scales(const uint8_t* scales) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
  if constexpr (F == Fp4Format::kMxfp4) {
    // The byte is the exponent field; byte 0 is the subnormal 2^-127.
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));
  } else {
    return finite_e4m3(_mm_cvtepu8_epi16(bytes));
  }
}

template <Fp4Format F>
inline Vec block_scales(const uint8_t* scales) {
  return {half_block_scales<F>(scales), half_block_scales<F>(scales + 8)};
}

// Decodes columns 8 j .. 8 j + 7 of 16 rows to w[c][r]. Three bits of a code select the magnitude; the fourth
// is the sign.
inline void decode_words(const uint8_t* codes, float (*w)[kPanelRows]) {
  const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const __m256i sign_bit = _mm256_set1_epi32(INT32_MIN);
  for (int half = 0; half < 2; ++half) {
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes) + half);
    for (int i = 0; i < 8; ++i) {
      const int column = i < 4 ? 2 * i : 2 * i - 7;
      const __m256 value = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(words, 4 * i));
      const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(words, 28 - 4 * i), sign_bit);
      _mm256_store_ps(w[column] + 8 * half, _mm256_xor_ps(value, _mm256_castsi256_ps(sign)));
    }
  }
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
