// Vec in AVX-512.
#pragma once

#include <immintrin.h>

namespace fp4moe::FP4MOE_ISA {

struct Vec {
  __m512 v;
};

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1); }
inline __m512 widen(__m256i bf16_bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16_bits), 16));
}
// Rounds to nearest, ties to even; NaN stays NaN. (vcvtneps2bf16 would flush subnormals.)
inline __m256i narrow(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40)));
}

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) { return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Vec load_partial(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline Vec load_partial(const bf16* p, int64_t n) {
  return {widen(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
struct VecPair {
  Vec even, odd;
};
inline VecPair split_pairs(__m512i pairs) {
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
inline VecPair load_pairs(const bf16* p) { return split_pairs(_mm512_loadu_si512(p)); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x.v)); }
inline void store_partial(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline void store_partial(bf16* p, Vec x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x.v));
}

inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// A NaN in b propagates.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline Vec and_bits(Vec v, uint32_t mask) {
  return {_mm512_and_ps(v.v, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(mask))))};
}
inline Vec or_bits(Vec a, Vec b) { return {_mm512_or_ps(a.v, b.v)}; }
inline void store_int8_eights(int8_t* p, Vec v) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v.v));
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(bytes, order));
}

// Transposes 4 x 4 elements within 128-bit lanes, then the 4 x 4 lanes.
inline void transpose(Vec* rows) {
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {  // u[4 b + i] holds, in lane l, rows 4 b .. 4 b + 3 of column 4 l + i
    const __m512 low01 = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88),
                 high01 = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
    rows[i].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    rows[i + 8].v = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    rows[i + 4].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    rows[i + 12].v = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}

inline float sum(Vec x) { return _mm512_reduce_add_ps(x.v); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x.v); }

// Rounds to the nearest integer, ties to even.
inline Vec round(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Returns x * 2^n for integral n; a NaN x stays NaN.
inline Vec scale_by_power_of_2(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Returns y where x >= limit or x is NaN, and 0 elsewhere.
inline Vec zero_below(Vec x, float limit, Vec y) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, y.v)};
}

}  // namespace fp4moe::FP4MOE_ISA
