// Computes  expert_dot_int8 for AVX-512 with VNNI: rows of int8 codes (see kernels/act_quant.h) times the
//           panels' codes, which a byte permute maps to unsigned bytes: doubled e2m1 values + 12.
// Bytes     the panels once for up to 12 rows; x from the cache. Two panels side by side keep more reads in
//           flight.
// Flops     2 T N K; a block of 32 costs 8 dots and 3 operations per row, and 15 operations for all rows
//           together.
// Bound     memory up to 4 rows, the dots from 6 rows on.
// Numerics  A sum starts at the value that cancels the 12, so a block's sum is exact in int32 and in f32; the
//           factor 1/2 in the scale undoes the doubling exactly, so the bits are those of the same codes in
//           f32.
#pragma once

#include "kernels/cpu/expert_decode_avx512.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Twice the codes' values, + 12. The table is repeated four times, since a byte permute reads six index bits.
alignas(64) constexpr uint8_t kCodeDoubled[64] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The most rows for two panels side by side: their sums and totals leave 8 of 32 registers.
constexpr int kMaxPairTokens = 6;

#if defined(__AMX_TILE__)
constexpr int64_t kInt8PrefetchBytes = 2 << 10;  // ahead in each panel
#else
constexpr int64_t kInt8PrefetchBytes = kPrefetchBytes;
#endif

// Computes out[p][t][r] = sum over blocks of (x[t] . w[r] in the block) * x's block scale * w's block scale,
// t < NT, for P panels p side by side.
template <Fp4Format F, int NT, int P>
void expert_dot_int8(const uint8_t* panels, int64_t k, const int8_t* x, const Int8Blocks& x_blocks,
                     float (*const* out)[kPanelRows]) {
  constexpr int kBlock = fp4_block(F), kWords = kBlock / 8;
  const int64_t num_blocks = k / kBlock, panel_bytes = expert_panel_bytes(F, k);
  const __m512i doubled = _mm512_load_si512(kCodeDoubled);
  const uint8_t* codes = panels + expert_panel_scale_bytes(F, k);
  for (int p = 0; p < P; ++p)  // starts where the previous panels' prefetches end
    for (const uint8_t* at = panels; at < codes; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(at + p * panel_bytes + kInt8PrefetchBytes), _MM_HINT_T0);
  __m512 total[P][NT];
  for (int p = 0; p < P; ++p)
    for (int t = 0; t < NT; ++t) total[p][t] = _mm512_setzero_ps();
  for (int64_t b = 0; b < num_blocks; ++b, codes += kWords * 64, x += kBlock) {
    // At a panel's last columns, fetch the first columns of the next P panels.
    const bool last = (num_blocks - b) * kWords * 64 <= kInt8PrefetchBytes;
    const int64_t ahead = kInt8PrefetchBytes + (last ? (P - 1) * panel_bytes : 0);
    __m512i sum[P][NT];
    for (int p = 0; p < P; ++p)
      for (int t = 0; t < NT; ++t) sum[p][t] = _mm512_set1_epi32(x_blocks.starts[t * num_blocks + b]);
#pragma GCC unroll 4
    for (int j = 0; j < kWords; ++j) {
      __m512i words[P];
      for (int p = 0; p < P; ++p) {
        const uint8_t* at = codes + p * panel_bytes + 64 * j;
        _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T0);
        words[p] = _mm512_load_si512(at);
      }
      for (int half = 0; half < 2; ++half) {
        __m512i w[P];
        for (int p = 0; p < P; ++p)
          w[p] = _mm512_permutexvar_epi8(half == 0 ? words[p] : _mm512_srli_epi16(words[p], 4), doubled);
        for (int t = 0; t < NT; ++t) {
          int four;
          __builtin_memcpy(&four, x + t * k + 8 * j + 4 * half, 4);
          for (int p = 0; p < P; ++p)
            sum[p][t] = _mm512_dpbusd_epi32(sum[p][t], w[p], _mm512_set1_epi32(four));
        }
      }
    }
    for (int p = 0; p < P; ++p) {
      const __m512 w_scale = block_scales<F>(panels + p * panel_bytes + b * kPanelRows);
      const __m512 scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(0.5f));
      for (int t = 0; t < NT; ++t) {
        const __m512 x_scale = _mm512_set1_ps(x_blocks.scales[t * num_blocks + b]);
        const __m512 exact = _mm512_cvtepi32_ps(sum[p][t]);
        total[p][t] = _mm512_fmadd_ps(scale, _mm512_mul_ps(exact, x_scale), total[p][t]);
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out[p][t], total[p][t]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
