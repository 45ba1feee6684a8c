// Helpers shared by the AMX kernels. The eight tiles have up to 16 rows of 64 bytes: tiles 0 to 3 hold sums
// [rows, 16 outputs], 4 and 5 hold rows of x, and 6 and 7 hold weights, with 4 bytes (a pair of bf16 columns)
// for each of 16 outputs in a row. A step multiplies 32 bf16 columns of R row tiles by P weight tiles.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "formats/bf16.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kTileRows = 16, kTileColumns = 32;
using WeightTile = uint16_t[kTileColumns / 2][2 * kTileRows];

// num_rows rows cut into tiles of one height: the last tile overlaps the tile before it by done(i) rows.
struct RowTiles {
  int64_t num_rows, height, count;

  explicit RowTiles(int64_t rows)
      : num_rows(rows),
        height(rows < kTileRows ? rows : kTileRows),
        count((rows + kTileRows - 1) / kTileRows) {}
  int64_t first(int64_t i) const { return i + 1 < count ? i * kTileRows : num_rows - height; }
  int64_t done(int64_t i) const { return i * kTileRows - first(i); }
};

// The tile configuration in the format that ldtilecfg reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// A compiler barrier between accesses to `memory` and tile loads or stores, whose accesses the compiler does
// not see.
inline void tile_memory_written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Configures the tiles for `height` rows of x, each of which is loaded x_bytes at a time.
inline void configure_tiles(int64_t height, int x_bytes) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? x_bytes : 64);
    config.rows[i] = static_cast<uint8_t>(i < 6 ? height : x_bytes / 4);
  }
  tile_memory_written(&config);
  _tile_loadconfig(&config);
}

inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Adds R row tiles times P weight tiles to the sums. If R or P is 1, its second pointer is not read.
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

// Stores the sums of row tile r and weight tile p to out[r][p], 16 floats per row.
template <int R, int P>
inline void store_tiles(float* const (&out)[R][P]) {
  _tile_stored(0, out[0][0], 64);
  if constexpr (P == 2) _tile_stored(1, out[0][1], 64);
  if constexpr (R == 2) _tile_stored(2, out[1][0], 64);
  if constexpr (R == 2 && P == 2) _tile_stored(3, out[1][1], 64);
}

// The columns after the last whole step, padded with zeros.
struct TailTiles {
  alignas(64) uint16_t x[2][kTileRows][kTileColumns] = {};
  alignas(64) WeightTile weights[2] = {};

  void copy_rows(int i, const bf16* from, int64_t rows, int64_t stride, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) x[i][r][c] = from[r * stride + c].bits;
  }

  template <int R, int P>
  void multiply() const {
    tile_memory_written(this);
    multiply_tiles<R, P>(x[0], x[1], 2 * kTileColumns, weights[0], weights[1]);
  }
};

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
