// Computes  the tile of linear_chunk.cc for 8-bit weights (Q8, FP8) in the panels of q8_panel.h.
// Bytes     N K of codes and the scales (Q8: N K / 16; FP8: N K / 32 for 128 columns), once for up to 12
//           rows.
// Flops     2 T N K; decoding costs 5 instructions per 64 weights on AVX-512, once per tile.
// Bound     as with bf16 weights. On AMX, this file handles only f32 rows (bf16 rows: linear_code_amx.h).
// Numerics  codes are exact in bf16 and f32. The products of a block of 32 columns are summed in f32 from
//           zero, pair by pair in ascending k; total = fma(scale, sum, total), in ascending block order, for
//           every T, tile and chunk.
#pragma once

#include "kernels/cpu/linear_step.h"
#include "kernels/cpu/q8_panel.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kCodeColumns = 32;              // of a block
constexpr int64_t kCodePrefetchBytes = 4096;  // ahead in each panel's stream

template <class Step, int P, int R, class Tiles>
struct CodeTile {
  using Codes = typename Tiles::Codes;
  const Tiles& tiles;
  int64_t panel;  // the first of P
  const uint8_t* first_code = tiles.codes(panel);
  int64_t panel_bytes = tiles.panel_bytes;  // from the codes of one panel to the next
  static constexpr bool kPrefetch = R <= Tiles::kShape.small_rows;
  Vec totals[P][R];

  // Adds a block to the totals. x points to the block's columns of R rows.
  void add_block(int64_t block, const typename Step::X* x, int64_t stride) {
    const uint8_t* codes = first_code + block * (kCodeColumns * kLanes);
    Vec sums[P][R];
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r) sums[p][r] = zero();
    for (int k = 0; k < kCodeColumns; k += 4, codes += 4 * kLanes, x += 4) {
      CodeQuad<Codes> quads[P];
      for (int p = 0; p < P; ++p) {
        quads[p] = load_quad<Codes>(codes + p * panel_bytes);
        if constexpr (kPrefetch) __builtin_prefetch(codes + p * panel_bytes + kCodePrefetchBytes);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        typename Step::Weights weights[P];
        for (int p = 0; p < P; ++p) weights[p] = Step::pair(quads[p], i);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const auto two = Step::two(x + r * stride + 2 * i);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) sums[p][r] = Step::add_two(sums[p][r], two, weights[p]);
        }
      }
    }
    for (int p = 0; p < P; ++p) {
      const Vec scales = tiles.scales(panel + p, block);
      for (int r = 0; r < R; ++r) totals[p][r] = fma(scales, sums[p][r], totals[p][r]);
    }
  }
};

template <class Step, int P, int R, class Tiles>
void code_tile(const Tiles& a, int64_t row, int64_t panel) {
  using X = typename Step::X;
  const int64_t whole = a.k / kCodeColumns, rest = a.k % kCodeColumns;
  const auto* x = static_cast<const X*>(a.x) + row * a.x_stride;
  CodeTile<Step, P, R, Tiles> tile{.tiles = a, .panel = panel};
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) tile.totals[p][r] = zero();
  for (int64_t b = 0; b < whole; ++b) tile.add_block(b, x + b * kCodeColumns, a.x_stride);
  if (rest > 0) {
    X last[R][kCodeColumns] = {};
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < rest; ++i) last[r][i] = x[r * a.x_stride + whole * kCodeColumns + i];
    tile.add_block(whole, last[0], kCodeColumns);
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) a.store(row + r, panel + p, tile.totals[p][r]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
