// Vec in AVX2 and FMA: two 8-lane halves.
#pragma once

#include <immintrin.h>

namespace fp4moe::FP4MOE_ISA {

struct Vec {
  __m256 lo, hi;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 load_half(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vec load(const bf16* p) { return {load_half(p), load_half(p + 8)}; }
struct VecPair {
  Vec even, odd;
};
inline VecPair load_pairs(const bf16* p) {
  const __m256i* pairs = reinterpret_cast<const __m256i*>(p);
  const __m256i lo = _mm256_loadu_si256(pairs), hi = _mm256_loadu_si256(pairs + 1);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {
      {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
      {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))}};
}

inline void store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
// Rounds eight f32 to nearest, ties to even, and returns their bf16 bits in 32-bit lanes; NaN stays NaN.
inline __m256i round_to_bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store(bf16* p, Vec v) {
  const __m256i packed = _mm256_packus_epi32(round_to_bf16_bits(v.lo), round_to_bf16_bits(v.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Partial vectors are rare (the last columns of a row), so they are copied through a buffer.
template <class T>
inline Vec load_partial(const T* p, int64_t n) {
  if (n >= 16) return load(p);
  alignas(32) T buffer[16] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
inline void store_partial(T* p, Vec v, int64_t n) {
  if (n >= 16) return store(p, v);
  alignas(32) T buffer[16];
  store(buffer, v);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// A NaN in b propagates.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

inline Vec and_bits(Vec v, uint32_t mask) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(mask)));
  return {_mm256_and_ps(v.lo, m), _mm256_and_ps(v.hi, m)};
}
inline Vec or_bits(Vec a, Vec b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
inline void store_int8_eights(int8_t* p, Vec v) {
  // Each 128-bit lane of halves has four of lo, then four of hi; so the bytes are lo 0-3, hi 0-3, lo 4-7, hi
  // 4-7.
  const __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(bytes, order));
}

// Transposes eight rows of eight: interleaves pairs of rows, then pairs of pairs, then exchanges halves.
inline void transpose8(__m256* r) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
inline void transpose(Vec* rows) {
  __m256 quarter[4][8];  // upper left, upper right, lower left, lower right
  for (int i = 0; i < 8; ++i) {
    quarter[0][i] = rows[i].lo;
    quarter[1][i] = rows[i].hi;
    quarter[2][i] = rows[i + 8].lo;
    quarter[3][i] = rows[i + 8].hi;
  }
  for (int q = 0; q < 4; ++q) transpose8(quarter[q]);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {quarter[0][i], quarter[2][i]};
    rows[i + 8] = {quarter[1][i], quarter[3][i]};
  }
}

inline float sum(Vec v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(Vec v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// Rounds to the nearest integer, ties to even.
inline Vec round(Vec x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, kMode), _mm256_round_ps(x.hi, kMode)};
}
inline __m256 scale_by_power_of_2(__m256 x, __m256 n) {
  const __m256i scaled =
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
  return _mm256_blendv_ps(_mm256_castsi256_ps(scaled), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
// Returns x * 2^n for integral n that keeps x normal; a NaN x stays NaN.
inline Vec scale_by_power_of_2(Vec x, Vec n) {
  return {scale_by_power_of_2(x.lo, n.lo), scale_by_power_of_2(x.hi, n.hi)};
}
// Returns y where x >= limit or x is NaN, and 0 elsewhere.
inline Vec zero_below(Vec x, float limit, Vec y) {
  const __m256 l = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, l, _CMP_LT_OQ), y.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(x.hi, l, _CMP_LT_OQ), y.hi)};
}

}  // namespace fp4moe::FP4MOE_ISA
