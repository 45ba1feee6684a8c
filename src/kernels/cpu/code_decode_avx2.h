// Decodes the 8-bit codes of a 64-byte quad (q8_panel.h) to f32, in AVX2.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Magnitudes of the codes in the lanes' upper bytes.
struct Q8Codes {
  static __m256 magnitudes(__m256i lanes) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(lanes, 24), _mm256_set1_epi32(0x7f)));
  }
};
// Exponent and fraction bits of an e4m3 are those of an f32 that is 2^120 times smaller.
struct Fp8Codes {
  static __m256 magnitudes(__m256i lanes) {
    const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(lanes, 4), _mm256_set1_epi32(0x7f << 20));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
  }
};

template <class Codes>
struct CodeQuad {
  __m256i rows[2];  // 0-7, 8-15
};
template <class Codes>
inline CodeQuad<Codes> load_quad(const uint8_t* codes) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(codes);
  return {{_mm256_load_si256(halves), _mm256_load_si256(halves + 1)}};
}

// Returns the values of the codes in the lanes' upper bytes.
template <class Codes>
inline __m256 code_values(__m256i lanes) {
  const __m256i sign = _mm256_and_si256(lanes, _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(Codes::magnitudes(lanes), _mm256_castsi256_ps(sign));
}
template <class Codes>
inline VecPair quad_floats(const CodeQuad<Codes>& quad, int i) {
  __m256 even[2], odd[2];
  for (int half = 0; half < 2; ++half) {  // a pair of codes in each lane's upper half
    const __m256i zero = _mm256_setzero_si256();
    const __m256i pairs =
        i == 0 ? _mm256_unpacklo_epi16(zero, quad.rows[half]) : _mm256_unpackhi_epi16(zero, quad.rows[half]);
    even[half] = code_values<Codes>(_mm256_slli_epi32(pairs, 8));
    odd[half] = code_values<Codes>(pairs);
  }
  return {{even[0], even[1]}, {odd[0], odd[1]}};
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
