// Computes  expert_dot_int8 for AVX-512 with VNNI: rows of int8 codes (see kernels/act_quant.h) times the
//           panel's codes, looked up by a byte permute as unsigned bytes: doubled e2m1 values + 12.
// Bytes     the panel once for up to 12 rows; x from the cache.
// Flops     2 T N K; a block of 32 costs a row 8 dots and 3 operations, all rows together 15.
// Bound     memory up to 4 rows, the dots from 6 on.
// Numerics  A sum starts where it undoes the 12, so that a block's is exact in int32 and in f32; the half in
//           the scale undoes the doubling exactly: the bits are those of the same codes in f32.
#pragma once

#include "kernels/cpu/expert_decode_avx512.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Twice the codes' values, + 12, four times: a byte permute reads six index bits.
alignas(64) constexpr uint8_t kCodeDoubled[64] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                                                  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Memory is read at its rate by far prefetches into the L2 cache and near ones into the L1.
inline void prefetch_int8(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at + 4096), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(at + 1024), _MM_HINT_T0);
}

// out[t][r] = sum over blocks of (x[t] . w[r] in the block) * x's scale of it * w's, t < NT.
template <Fp4Format F, int NT>
void expert_dot_int8(const uint8_t* panel, int64_t k, const int8_t* x, const Int8Blocks& x_blocks,
                     float (*out)[kPanelRows]) {
  constexpr int kBlock = fp4_block(F), kWords = kBlock / 8;
  const int64_t num_blocks = k / kBlock;
  const __m512i doubled = _mm512_load_si512(kCodeDoubled);
  const uint8_t* codes = panel + expert_panel_scale_bytes(F, k);
  for (const uint8_t* at = panel; at < codes; at += 64) prefetch_int8(at);
  __m512 total[NT];
  for (int t = 0; t < NT; ++t) total[t] = _mm512_setzero_ps();
  for (int64_t b = 0; b < num_blocks; ++b, codes += kWords * 64, x += kBlock) {
    __m512i sum[NT];
    for (int t = 0; t < NT; ++t) sum[t] = _mm512_set1_epi32(x_blocks.starts[t * num_blocks + b]);
#pragma GCC unroll 4
    for (int j = 0; j < kWords; ++j) {
      prefetch_int8(codes + 64 * j);
      const __m512i words = _mm512_load_si512(codes + 64 * j);
      for (int half = 0; half < 2; ++half) {
        const __m512i w = _mm512_permutexvar_epi8(half == 0 ? words : _mm512_srli_epi16(words, 4), doubled);
        for (int t = 0; t < NT; ++t) {
          int four;
          __builtin_memcpy(&four, x + t * k + 8 * j + 4 * half, 4);
          sum[t] = _mm512_dpbusd_epi32(sum[t], w, _mm512_set1_epi32(four));
        }
      }
    }
    const __m512 scale = _mm512_mul_ps(block_scales<F>(panel + b * kPanelRows), _mm512_set1_ps(0.5f));
    for (int t = 0; t < NT; ++t) {
      const __m512 x_scale = _mm512_set1_ps(x_blocks.scales[t * num_blocks + b]);
      total[t] = _mm512_fmadd_ps(scale, _mm512_mul_ps(_mm512_cvtepi32_ps(sum[t]), x_scale), total[t]);
    }
  }
  for (int t = 0; t < NT; ++t) _mm512_storeu_ps(out[t], total[t]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
