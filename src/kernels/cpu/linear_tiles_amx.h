// linear_chunk for bf16 rows on CPUs with AMX: multiplies 16 or 32 rows by one or two panels, with sums in
// tiles. 32 columns of a panel, as stored, form a weight tile.
#pragma once

#include "kernels/cpu/linear_rows_amx.h"
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int64_t kTileElems = kTileColumns * kLanes;   // of a weight tile
constexpr int64_t kTilePrefetchElems = 4 * kTileElems;  // ahead in each panel's stream

// Multiplies tiles i .. i + R - 1 of the chunk's rows by panels panel .. panel + P - 1.
template <int R, int P, class Tiles>
void linear_tiles(const Tiles& a, int64_t row_begin, const RowTiles& rows, int64_t i, int64_t panel) {
  const int64_t whole = a.k / kTileColumns, tail = a.k % kTileColumns, stride = a.x_stride;
  const int64_t panel_elems = (a.k + 1) / 2 * 2 * kLanes;
  const bf16 *x[R], *w[P];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const bf16*>(a.x) + (row_begin + rows.first(i + r)) * stride;
  for (int p = 0; p < P; ++p) w[p] = a.weight + (panel + p) * panel_elems;
  zero_tiles();
  for (int64_t c = 0; c < whole; ++c) {
    if (i == 0)  // later rows find the panels in the cache
      for (int64_t line = 0; line < kTileElems; line += 2 * kLanes)
        for (int p = 0; p < P; ++p) __builtin_prefetch(w[p] + line + kTilePrefetchElems);
    multiply_tiles<R, P>(x[0], x[R - 1], 2 * stride, w[0], w[P - 1]);
    for (int r = 0; r < R; ++r) x[r] += kTileColumns;
    for (int p = 0; p < P; ++p) w[p] += kTileElems;
  }
  if (tail != 0) {
    TailTiles t;
    for (int r = 0; r < R; ++r) t.copy_rows(r, x[r], rows.height, stride, tail);
    for (int p = 0; p < P; ++p)
      for (int64_t e = 0; e < (tail + 1) / 2 * 2 * kLanes; ++e) t.weights[p][e / 32][e % 32] = w[p][e].bits;
    t.multiply<R, P>();
  }
  alignas(64) float sums[R][P][kTileRows][kLanes];
  float* to[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) to[r][p] = sums[r][p][0];
  store_tiles<R, P>(to);
  for (int r = 0; r < R; ++r)
    for (int64_t t = rows.done(i + r); t < rows.height; ++t)
      for (int p = 0; p < P; ++p) a.store(row_begin + rows.first(i + r) + t, panel + p, load(sums[r][p][t]));
}

template <class Tiles>
void run_tiles(const Tiles& a, const LinearChunk& c) {
  const RowTiles rows(c.row_end - c.row_begin);
  if (rows.num_rows == 0) return;
  if (rows.num_rows <= Bf16Panels::kFewRows) return run_rows<Bf16Panels>(a, c);
  configure_tiles(rows.height, 2 * kTileColumns);
  for (int64_t panel = c.panel_begin; panel < c.panel_end; panel += 2)
    for (int64_t i = 0; i < rows.count; i += 2) {
      const bool two_rows = i + 1 < rows.count, two_panels = panel + 1 < c.panel_end;
      const auto tiles = two_rows     ? two_panels ? linear_tiles<2, 2, Tiles> : linear_tiles<2, 1, Tiles>
                             : two_panels ? linear_tiles<1, 2, Tiles>
                                      : linear_tiles<1, 1, Tiles>;
      tiles(a, c.row_begin, rows, i, panel);
    }
  _tile_release();
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
