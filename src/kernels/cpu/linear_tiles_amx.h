// linear_chunk of bf16 rows for CPUs with AMX: 16 or 32 rows times one or two panels, sums in tiles. As a
// panel lies in memory, 32 of its columns are a weight tile.
#pragma once

#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kTileColumns = 32;
constexpr int64_t kTileElems = kTileColumns * kLanes;   // of a weight tile
constexpr int64_t kTilePrefetchElems = 4 * kTileElems;  // ahead in each panel's stream

// R x P tiles of sums; with R or P of 1 the second pointer is not read.
template <int R, int P>
inline void multiply_tiles(const void* x0, const void* x1, int64_t x_stride_bytes, const void* w0,
                           const void* w1) {
  _tile_loadd(4, x0, x_stride_bytes);
  _tile_loadd(6, w0, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (P == 2) {
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (R == 2) {
    _tile_loadd(5, x1, x_stride_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (P == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

// The columns behind the last whole tile, then zeros.
struct TailTiles {
  alignas(64) uint16_t x[2][kTileRows][kTileColumns] = {};
  alignas(64) uint16_t w[2][kTileElems] = {};

  void copy_rows(int i, const bf16* from, int64_t rows, int64_t stride, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) x[i][r][c] = from[r * stride + c].bits;
  }
  void copy_weights(int i, const bf16* from, int64_t columns) {
    for (int64_t e = 0; e < (columns + 1) / 2 * 2 * kLanes; ++e) w[i][e] = from[e].bits;
  }
};

// Tiles i .. i + R - 1 of the chunk's rows times panels panel .. panel + P - 1.
template <int R, int P, class Tiles>
void linear_tiles(const Tiles& a, int64_t row_begin, const RowTiles& rows, int64_t i, int64_t panel) {
  const int64_t whole = a.k / kTileColumns, tail = a.k % kTileColumns, stride = a.x_stride;
  const int64_t panel_elems = (a.k + 1) / 2 * 2 * kLanes;
  const bf16 *x[R], *w[P];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const bf16*>(a.x) + (row_begin + rows.first(i + r)) * stride;
  for (int p = 0; p < P; ++p) w[p] = a.weight + (panel + p) * panel_elems;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t c = 0; c < whole; ++c) {
    for (int64_t line = 0; line < kTileElems; line += 2 * kLanes)
      for (int p = 0; p < P; ++p) __builtin_prefetch(w[p] + line + kTilePrefetchElems);
    multiply_tiles<R, P>(x[0], x[R - 1], 2 * stride, w[0], w[P - 1]);
    for (int r = 0; r < R; ++r) x[r] += kTileColumns;
    for (int p = 0; p < P; ++p) w[p] += kTileElems;
  }
  if (tail != 0) {
    TailTiles t;
    for (int r = 0; r < R; ++r) t.copy_rows(r, x[r], rows.height, stride, tail);
    for (int p = 0; p < P; ++p) t.copy_weights(p, w[p], tail);
    tile_memory_written(&t);
    multiply_tiles<R, P>(t.x[0], t.x[1], 2 * kTileColumns, t.w[0], t.w[1]);
  }
  alignas(64) float sums[R][P][kTileRows][kLanes];
  _tile_stored(0, sums[0][0], 64);
  if constexpr (P == 2) _tile_stored(1, sums[0][1], 64);
  if constexpr (R == 2) _tile_stored(2, sums[1][0], 64);
  if constexpr (R == 2 && P == 2) _tile_stored(3, sums[1][1], 64);
  for (int r = 0; r < R; ++r)
    for (int64_t t = rows.done(i + r); t < rows.height; ++t)
      for (int p = 0; p < P; ++p) a.store(row_begin + rows.first(i + r) + t, panel + p, load(sums[r][p][t]));
}

template <class Tiles>
void run_tiles(const Tiles& a, const LinearChunk& c) {
  const RowTiles rows(c.row_end - c.row_begin);
  if (rows.count == 0) return;
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
