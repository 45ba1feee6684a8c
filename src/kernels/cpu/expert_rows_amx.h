// Computes  one or two rows of bf16 x times a panel of MXFP4 by FMA, which reads at nearly memory's rate: the
//           sums of expert_dot_amx.h's tiles, bit for bit.
// Bytes     the panel once; x comes from the cache, as floats.
// Flops     2 T N K, and two operations for 16 weights to unpack them.
// Bound     memory.
// Numerics  even and odd columns of 32 each from 0 in ascending order, the two added, times the block's scale
//           to the total. In the tiles each weight has its scale: a panel whose exponents, with x's, could
//           make that another number is left to them.
#pragma once

#include "kernels/cpu/expert_decode_avx512.h"
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kStepCodeBytes = kTileColumns / 8 * 64;

// MXFP4 scale bytes whose products with all codes are normal bf16 numbers.
constexpr unsigned kMinScaleByte = 2, kMaxScaleByte = 252;

alignas(64) constexpr float kCodeFloat[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The least and largest exponents, biased by 127, of numbers other than 0; none: {255, 0}.
struct Exponents {
  unsigned least = 255, most = 0;
};

// Up to two rows of x [rows, K] as floats.
constexpr int64_t kFewRows = 2, kMaxFewColumns = 8192;
struct FewRows {
  int64_t num_rows = 0;  // 0: they were not made
  Exponents exponents;
  alignas(64) float x[kFewRows * kMaxFewColumns];
};

constexpr int64_t kFewPrefetchBytes = 3072;

// k is a multiple of 32.
inline void make_few_rows(const bf16* x, int64_t num_rows, int64_t k, FewRows& few) {
  few.num_rows = num_rows;
  __m512i least = _mm512_set1_epi16(0x7fff), most = _mm512_setzero_si512();
  for (int64_t i = 0; i < num_rows * k; i += 32) {
    const __m512i bits = _mm512_loadu_si512(x + i), v = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    for (int half = 0; half < 2; ++half) {
      const __m256i words = half == 0 ? _mm512_castsi512_si256(bits) : _mm512_extracti64x4_epi64(bits, 1);
      _mm512_store_si512(few.x + i + 16 * half, _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    }
    least = _mm512_mask_min_epu16(least, _mm512_test_epi16_mask(v, v), least, v);
    most = _mm512_max_epu16(most, v);
  }
  alignas(64) uint16_t low[32], high[32];
  _mm512_store_si512(low, least);
  _mm512_store_si512(high, most);
  for (int i = 0; i < 32; ++i) {
    const unsigned from = low[i] >> 7, to = high[i] >> 7;
    few.exponents.least = from < few.exponents.least ? from : few.exponents.least;
    few.exponents.most = to > few.exponents.most ? to : few.exponents.most;
  }
}

// Whether all products of codes and such scales are normal bf16 numbers, or 0.
inline bool products_fit(const Exponents& scales) {
  return scales.least >= kMinScaleByte && scales.most <= kMaxScaleByte;
}

// Whether a block's sums are the same with its scale behind them. All products are multiples of the least
// one's last bit, 2^-7 of x and 2^-1 of the weight: with the scale inside, sums are normal numbers, or 0, if
// that is one; without it f32 has even what is below. A block's are less than 2^9 times the largest x.
inline bool scale_may_wait(const Exponents& x, const Exponents& scales) {
  const int least = int(x.least) - 127 - 7 - 1, most = int(x.most) - 127 + 9;
  return products_fit(scales) && x.least > 0 && least + int(scales.least) - 127 >= -126 && most <= 127 &&
         most + int(scales.most) - 127 <= 127;
}

// out[t][r] of one panel, R rows of x. Returns the exponents of its scales.
template <int R>
Exponents few_rows_dot(const uint8_t* panel, int64_t k, const float* x, float (*out)[kPanelRows]) {
  const __m512 table = _mm512_load_ps(kCodeFloat);
  const uint8_t* codes = panel + expert_panel_scale_bytes(Fp4Format::kMxfp4, k);
  // The steps before, of another panel, came up to here without these.
  for (const uint8_t* at = panel; at < codes; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(at + kFewPrefetchBytes), _MM_HINT_T0);
  __m512 total[R];
  for (int t = 0; t < R; ++t) total[t] = _mm512_setzero_ps();
  __m128i least_scale = _mm_set1_epi8(-1), most_scale = _mm_setzero_si128();
  for (int64_t b = 0; b < k / kTileColumns; ++b, codes += kStepCodeBytes, x += kTileColumns) {
    __m512 even[R], odd[R];
    for (int t = 0; t < R; ++t) even[t] = odd[t] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int j = 0; j < kTileColumns / 8; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * j + kFewPrefetchBytes), _MM_HINT_T0);
      const __m512i words = _mm512_load_si512(codes + 64 * j);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512 low = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * i), table);
        const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 + 4 * i), table);
#pragma GCC unroll 2
        for (int t = 0; t < R; ++t) {
          even[t] = _mm512_fmadd_ps(low, _mm512_set1_ps(x[t * k + 8 * j + 2 * i]), even[t]);
          odd[t] = _mm512_fmadd_ps(high, _mm512_set1_ps(x[t * k + 8 * j + 2 * i + 1]), odd[t]);
        }
      }
    }
    const __m128i scales = _mm_load_si128(reinterpret_cast<const __m128i*>(panel + b * kPanelRows));
    least_scale = _mm_min_epu8(least_scale, scales);
    most_scale = _mm_max_epu8(most_scale, scales);
    const __m512 scale = block_scales<Fp4Format::kMxfp4>(panel + b * kPanelRows);
    for (int t = 0; t < R; ++t) total[t] = _mm512_fmadd_ps(scale, _mm512_add_ps(even[t], odd[t]), total[t]);
  }
  for (int t = 0; t < R; ++t) _mm512_storeu_ps(out[t], total[t]);
  return {_mm512_reduce_min_epu32(_mm512_cvtepu8_epi32(least_scale)),
          _mm512_reduce_max_epu32(_mm512_cvtepu8_epi32(most_scale))};
}

// Of the scales: the least of blocks that hold a code other than 0.
inline Exponents nonzero_scale_exponents(const uint8_t* panel, int64_t k) {
  const uint8_t* codes = panel + expert_panel_scale_bytes(Fp4Format::kMxfp4, k);
  Exponents exponents;
  for (int64_t b = 0; b < k / kTileColumns; ++b) {
    __m512i magnitudes = _mm512_setzero_si512();
    for (int j = 0; j < kTileColumns / 8; ++j, codes += 64)
      magnitudes = _mm512_or_si512(magnitudes, _mm512_load_si512(codes));
    const __mmask16 rows = _mm512_test_epi32_mask(magnitudes, _mm512_set1_epi32(0x77777777));
    const __m512i scales =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(panel + b * kPanelRows)));
    const unsigned least = _mm512_mask_reduce_min_epu32(rows, scales), most = _mm512_reduce_max_epu32(scales);
    exponents.least = least < exponents.least ? least : exponents.least;
    exponents.most = most > exponents.most ? most : exponents.most;
  }
  return exponents;
}

// Whether out has the panel's sums now.
inline bool few_rows_panel(const uint8_t* panel, int64_t k, const FewRows& few, float (*out)[kPanelRows]) {
  const auto dot = few.num_rows == 1 ? few_rows_dot<1> : few_rows_dot<2>;
  return scale_may_wait(few.exponents, dot(panel, k, few.x, out)) ||
         scale_may_wait(few.exponents, nonzero_scale_exponents(panel, k));
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
