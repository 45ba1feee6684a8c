// What the AMX kernels share. Of the eight tiles, up to 16 rows of 64 bytes each, 0 to 3 hold sums [rows, 16
// outputs], 4 and 5 rows of x, 6 and 7 weights: a row of theirs is 4 bytes (a pair of bf16 columns) of each
// of 16 outputs.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kTileRows = 16;

// num_rows rows cut into tiles of one height: the last tile overlaps the one before by done(i) rows.
struct RowTiles {
  int64_t num_rows, height, count;

  explicit RowTiles(int64_t rows)
      : num_rows(rows),
        height(rows < kTileRows ? rows : kTileRows),
        count((rows + kTileRows - 1) / kTileRows) {}
  int64_t first(int64_t i) const { return i + 1 < count ? i * kTileRows : num_rows - height; }
  int64_t done(int64_t i) const { return i * kTileRows - first(i); }
};

// As ldtilecfg reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Between writes to `memory` and tile loads, of which the compiler does not know that they read.
inline void tile_memory_written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// For tiles of `height` rows of x, x_bytes of each at a time.
inline void configure_tiles(int64_t height, int x_bytes) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? x_bytes : 64);
    config.rows[i] = static_cast<uint8_t>(i < 6 ? height : x_bytes / 4);
  }
  tile_memory_written(&config);
  _tile_loadconfig(&config);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
