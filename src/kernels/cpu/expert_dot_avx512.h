// Computes  expert_dot for AVX-512 with BF16. bf16 rows: out[t, r] = sum over k of x[t, k] * w[r, k] for one
//           panel of 16 rows r. A 16-bit permute looks up 32 codes at once; it reads five index bits, so a
//           table that holds the 16 codes twice needs no mask. int8 rows: expert_dot_int8_avx512.h.
// Shapes    x [NT, K] bf16, NT <= 12; one panel (expert_panel.h); out [NT, 16] f32.
// Bytes     the panel once, K (8 + 16 / G); x, from the cache.
// Flops     32 NT K; decoding 32 weights costs a shift and a permute, once for all rows; each row needs one
//           vdpbf16ps for them, and one fma per block.
// Bound     memory for few rows, then vdpbf16ps.
// Numerics  products are exact; vdpbf16ps sums a block in f32 from zero, pairs of k in ascending order
//           (subnormals count as zero); total = fma(block's scale, sum, total), in ascending block order, for
//           every NT.
#pragma once

#include "kernels/cpu/expert_decode_avx512.h"
#include "kernels/cpu/expert_dot_int8_avx512.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Bit patterns of the codes' values as bf16.
alignas(64) constexpr uint16_t kCodeBf16[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// Computes out[t][r] = sum over k of x[t, k] * w[r, k], t < NT.
template <Fp4Format F, int NT>
void expert_dot_bf16(const uint8_t* panel, int64_t k, const bf16* x, float (*out)[kPanelRows]) {
  constexpr int kBlock = fp4_block(F), kWords = kBlock / 8;
  const __m512i table = _mm512_load_si512(kCodeBf16);
  const uint8_t* codes = panel + expert_panel_scale_bytes(F, k);
  __m512 total[NT];
  for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
  for (int64_t b = 0; b < k / kBlock; ++b, codes += kWords * 64, x += kBlock) {
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
    for (int t = 0; t < NT; ++t) total[t] = _mm512_fmadd_ps(scale, sum[t], total[t]);
  }
  for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out[t], total[t]);
}

// Multiplies NT rows by P panels. With kInt8, rows are int8 codes with x_blocks; otherwise they are bf16, and
// P is 1.
template <Fp4Format F, bool kInt8, int NT, int P>
void expert_dot(const uint8_t* panels, int64_t k, const void* rows, const Int8Blocks& x_blocks,
                float (*const* out)[kPanelRows]) {
  if constexpr (kInt8)
    expert_dot_int8<F, NT, P>(panels, k, static_cast<const int8_t*>(rows), x_blocks, out);
  else
    expert_dot_bf16<F, NT>(panels, k, static_cast<const bf16*>(rows), *out);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
