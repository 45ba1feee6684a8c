// expert_dot_int8 for AVX-512 with VNNI: rows of bytes (code + 128, see kernels/act_quant.h) times doubled
// e2m1 codes as signed bytes. 128 times the weights' sum, one more dot for all rows, takes the offset out
// again. A block's sum is exact in int32 and in f32, the half in the scale undoes the doubling exactly: the
// bits are those of the same codes in f32.
#pragma once

#include "kernels/cpu/expert_decode_avx512.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Twice the codes' values, once for each 128-bit lane.
alignas(64) constexpr int8_t kCodeDoubled[64] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                                 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                                 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                                 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// out[t][r] = sum over blocks of (x[t] . w[r] in the block) * x_scales[t, block] * w's block scale, t < NT.
template <Fp4Format F, int NT>
void expert_dot_int8(const uint8_t* panel, int64_t k, const uint8_t* x, const float* x_scales,
                     float (*out)[kPanelRows]) {
  constexpr int kBlock = fp4_block(F), kWords = kBlock / 8;
  const int64_t num_blocks = k / kBlock;
  const __m512i doubled = _mm512_load_si512(kCodeDoubled);
  const __m512i nibble = _mm512_set1_epi8(0x0f), offset = _mm512_set1_epi8(int8_t(0x80));
  const uint8_t* codes = panel + expert_panel_scale_bytes(F, k);
  __m512 total[NT];
  for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
  for (int64_t b = 0; b < num_blocks; ++b, codes += kWords * 64, x += kBlock) {
    __m512i sum[NT], excess = _mm512_setzero_si512();
    for (int t = 0; t < NT; ++t) sum[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < kWords; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * j + kPrefetchBytes), _MM_HINT_T0);
      const __m512i words = _mm512_load_si512(codes + 64 * j);
      for (int half = 0; half < 2; ++half) {
        const __m512i shifted = half == 0 ? words : _mm512_srli_epi16(words, 4);
        const __m512i w = _mm512_shuffle_epi8(doubled, _mm512_and_si512(shifted, nibble));
        excess = _mm512_dpbusd_epi32(excess, offset, w);
        for (int t = 0; t < NT; ++t) {
          int four;
          __builtin_memcpy(&four, x + t * k + 8 * j + 4 * half, 4);
          sum[t] = _mm512_dpbusd_epi32(sum[t], _mm512_set1_epi32(four), w);
        }
      }
    }
    const __m512 scale = _mm512_mul_ps(block_scales<F>(panel + b * kPanelRows), _mm512_set1_ps(0.5f));
    for (int t = 0; t < NT; ++t) {
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[t], excess));
      total[t] = _mm512_fmadd_ps(scale, _mm512_mul_ps(exact, _mm512_set1_ps(x_scales[t * num_blocks + b])),
                                 total[t]);
    }
  }
  for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out[t], total[t]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
