// Computes  the tile of linear_chunk.cc for 8-bit weights in the panels of q8_panel.h.
// Bytes     1.0625 N K of weights, once for up to 12 rows.
// Flops     2 T N K; decoding costs 5 instructions per 64 weights on AVX-512, once per tile.
// Bound     as with bf16 weights. On AMX, this file handles only f32 rows (bf16 rows: linear_q8_amx.h).
// Numerics  codes are exact in bf16 and f32. A block's products are summed in f32 from zero, pair by pair in
//           ascending k; total = fma(block's scale, sum, total), in ascending block order, for every T, tile
//           and chunk.
#pragma once

#include "kernels/cpu/linear_step.h"
#include "kernels/cpu/q8_panel.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kQ8Columns = 32;              // of a block
constexpr int64_t kQ8PrefetchBytes = 4096;  // ahead in each panel's stream

template <class Step, int P, int R>
struct Q8Tile {
  const uint8_t* panel;  // the first of P
  int64_t scale_bytes, panel_bytes;
  bool prefetch;
  Vec totals[P][R];

  // Adds a block to the totals. x points to the block's columns of R rows.
  void add_block(int64_t block, const typename Step::X* x, int64_t stride) {
    const uint8_t* codes = panel + scale_bytes + block * (kQ8Columns * kLanes);
    Vec sums[P][R];
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r) sums[p][r] = zero();
    for (int k = 0; k < kQ8Columns; k += 4, codes += 4 * kLanes, x += 4) {
      Q8Quad quads[P];
      for (int p = 0; p < P; ++p) {
        quads[p] = load_q8_quad(codes + p * panel_bytes);
        if (prefetch) __builtin_prefetch(codes + p * panel_bytes + kQ8PrefetchBytes);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        typename Step::Weights weights[P];
        for (int p = 0; p < P; ++p) weights[p] = Step::q8_pair(quads[p], i);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const auto two = Step::two(x + r * stride + 2 * i);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) sums[p][r] = Step::add_two(sums[p][r], two, weights[p]);
        }
      }
    }
    for (int p = 0; p < P; ++p) {
      const Vec scales = load(reinterpret_cast<const bf16*>(panel + p * panel_bytes) + block * kLanes);
      for (int r = 0; r < R; ++r) totals[p][r] = fma(scales, sums[p][r], totals[p][r]);
    }
  }
};

template <class Step, int P, int R, class Tiles>
void q8_tile(const Tiles& a, int64_t row, int64_t panel) {
  using X = typename Step::X;
  const int64_t panel_bytes = q8_panel_bytes(a.k), whole = a.k / kQ8Columns, rest = a.k % kQ8Columns;
  const auto* x = static_cast<const X*>(a.x) + row * a.x_stride;
  Q8Tile<Step, P, R> tile{.panel = a.weight + panel * panel_bytes,
                          .scale_bytes = q8_panel_scale_bytes(a.k),
                          .panel_bytes = panel_bytes,
                          .prefetch = R <= Tiles::kShape.small_rows};
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) tile.totals[p][r] = zero();
  for (int64_t b = 0; b < whole; ++b) tile.add_block(b, x + b * kQ8Columns, a.x_stride);
  if (rest > 0) {
    X last[R][kQ8Columns] = {};
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < rest; ++i) last[r][i] = x[r * a.x_stride + whole * kQ8Columns + i];
    tile.add_block(whole, last[0], kQ8Columns);
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) a.store(row + r, panel + p, tile.totals[p][r]);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
