// Computes  expert_dot for CPUs without bf16 dots: out[t, r] = sum over k of x[t, k] * w[r, k] for one panel
//           of 16 rows r. A block of the panel is decoded to f32 in the L1 cache, then multiplied by all
//           rows.
// Shapes    x [NT, K] bf16 or kI8 codes, NT <= kMaxTokens; one panel (expert_panel.h); out [NT, 16] f32.
// Bytes     the panel once, K (8 + 16 / G); x, from the cache.
// Flops     32 NT K; on AVX2, decoding 16 weights costs about 12 operations, once for all rows, and each row
//           costs two fma.
// Bound     the arithmetic: decoding for one row, the fma for several.
// Numerics  code values and x are exact in f32; a block is summed from zero in ascending k with fma (a
//           rounded product and a rounded sum on scalar). A kI8 row's block sum is exact and is then
//           multiplied by x's block scale. total = fma(block's scale, sum, total), in ascending block order,
//           for every NT.
#pragma once

#include "kernels/cpu/expert_panel.h"
#include "kernels/cpu/vec.h"

#if defined(__AVX2__)
#include "kernels/cpu/expert_decode_avx2.h"
#else
#include "kernels/cpu/expert_decode_scalar.h"
#endif

namespace fp4moe::FP4MOE_ISA {
namespace {

// Converts one block of a row to f32. Not used for a single bf16 row, which is 5 % faster if it is converted
// element by element.
template <bool kInt8, int kBlock>
inline void load_row(const void* rows, int64_t first, float* x) {
  for (int c = 0; c < kBlock; c += kLanes) {
    if constexpr (kInt8) {
      const int8_t* bytes = static_cast<const int8_t*>(rows) + first + c;
      for (int i = 0; i < kLanes; ++i) x[c + i / 8 * 8 + kInt8Columns[i % 8]] = static_cast<float>(bytes[i]);
    } else {
      store(x + c, load(static_cast<const bf16*>(rows) + first + c));
    }
  }
}

constexpr int kMaxPairTokens = 0;  // panels are processed one at a time

// Computes out[t][r] = sum over k of x[t, k] * w[r, k], t < NT. Rows are bf16 or, with kInt8, codes whose
// block sums are multiplied by x_blocks.scales[t, block].
template <Fp4Format F, bool kInt8, int NT, int P>
void expert_dot(const uint8_t* panel, int64_t k, const void* rows, const Int8Blocks& x_blocks,
                float (*const* outs)[kPanelRows]) {
  static_assert(P == 1);
  float(*const out)[kPanelRows] = *outs;
  constexpr int kBlock = fp4_block(F);
  const int64_t num_blocks = k / kBlock;
  const uint8_t* codes = panel + expert_panel_scale_bytes(F, k);
  for (int t = 0; t < NT; ++t) store(out[t], zero());
  for (int64_t b = 0; b < num_blocks; ++b, codes += kBlock / 8 * 64) {
    alignas(64) float w[kBlock][kPanelRows], x[NT][kBlock];
    for (int j = 0; j < kBlock / 8; ++j) decode_words(codes + 64 * j, &w[8 * j]);
    Vec sum[NT];
    for (int t = 0; t < NT; ++t) {
      if constexpr (kInt8 || NT > 1) load_row<kInt8, kBlock>(rows, t * k + b * kBlock, x[t]);
      sum[t] = zero();
    }
    for (int c = 0; c < kBlock; ++c) {
      const Vec weight = load(w[c]);
      for (int t = 0; t < NT; ++t) {
        const float element =
            kInt8 || NT > 1 ? x[t][c] : to_float(static_cast<const bf16*>(rows)[b * kBlock + c]);
        sum[t] = fma(weight, broadcast(element), sum[t]);
      }
    }
    const Vec scale = block_scales<F>(panel + b * kPanelRows);
    for (int t = 0; t < NT; ++t) {
      if constexpr (kInt8) sum[t] = mul(sum[t], broadcast(x_blocks.scales[t * num_blocks + b]));
      store(out[t], fma(scale, sum[t], load(out[t])));
    }
  }
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
