// expert_dot for AVX-512 with BF16. A 16-bit permute looks 32 codes up at once; it reads five index bits, so
// a table that holds the 16 codes twice needs no mask. The products are exact; sums of a block are FP32
// inside vdpbf16ps, and the block scale meets the FP32 sum once per block.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/expert_panel.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kMaxTokens = 12;           // 12 sums and 12 totals leave 8 of 32 registers
constexpr int kPrefetchBytes = 8 << 10;  // 2 KiB is too short, 16 KiB no better

// Bit patterns of the codes' values as bf16.
alignas(64) constexpr uint16_t kCodeBf16[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

template <Fp4Format F>
inline __m512 block_scales(const uint8_t* scales) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(scales));
  if constexpr (F == Fp4Format::kMxfp4) {
    // The byte is the exponent field; byte 0 is the subnormal 2^-127.
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
  } else {
    // An e4m3 byte in a half's sign, low exponent and high fraction bits is its value times 2^-8.
    const __m256i halves = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);
    const __m512 small = _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(int16_t(0xbfff))));
    return _mm512_mul_ps(small, _mm512_set1_ps(256.0f));
  }
}

// out[t][r] = sum over k of x[t, k] * w[r, k], t < NT. With kXScales each block's sum is multiplied by its
// x_scales[t, block] first.
template <Fp4Format F, bool kXScales, int NT>
void expert_dot(const uint8_t* panel, int64_t k, const bf16* x, const float* x_scales,
                float (*out)[kPanelRows]) {
  constexpr int kBlock = fp4_block(F), kWords = kBlock / 8;
  const int64_t num_blocks = k / kBlock;
  const __m512i table = _mm512_load_si512(kCodeBf16);
  const uint8_t* codes = panel + expert_panel_scale_bytes(F, k);
  __m512 total[NT];
  for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
  for (int64_t b = 0; b < num_blocks; ++b, codes += kWords * 64, x += kBlock) {
    __m512 sum[NT];
    for (int t = 0; t < NT; ++t) sum[t] = _mm512_setzero_ps();
    for (int j = 0; j < kWords; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * j + kPrefetchBytes), _MM_HINT_T0);
      const __m512i words = _mm512_load_si512(codes + 64 * j);
      for (int i = 0; i < 4; ++i) {
        const auto w = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * i), table);
        for (int t = 0; t < NT; ++t) {
          int pair;
          __builtin_memcpy(&pair, x + t * k + 8 * j + 2 * i, 4);
          sum[t] = _mm512_dpbf16_ps(sum[t], w, (__m512bh)_mm512_set1_epi32(pair));
        }
      }
    }
    const __m512 scale = block_scales<F>(panel + b * kPanelRows);
    for (int t = 0; t < NT; ++t) {
      if constexpr (kXScales) sum[t] = _mm512_mul_ps(sum[t], _mm512_set1_ps(x_scales[t * num_blocks + b]));
      total[t] = _mm512_fmadd_ps(scale, sum[t], total[t]);
    }
  }
  for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out[t], total[t]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
