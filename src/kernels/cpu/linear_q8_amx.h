// linear_chunk of bf16 rows and 8-bit weights for CPUs with AMX.
// Computes  as linear_q8_tile.h. A block's codes are exact in bf16; its sums leave the tile for their scale.
// Bytes     1.0625 N K of weights, once for all rows of a chunk.
// Flops     2 T N K.
// Bound     memory for a few rows; then the way out of the tiles.
// Numerics  one tdpbf16ps makes a block's sum: even and odd k each from 0 in ascending order, the two added;
//           total = fma(block's scale, sum, total), in ascending blocks, for every number of rows.
#pragma once

#include "kernels/cpu/linear_rows_amx.h"
#include "kernels/cpu/slab_tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

struct Q8Slab {
  using X = bf16;
  static constexpr int kBlock = kTileColumns, kBlocks = 8;
  static constexpr int64_t kPrefetchBytes = 8192;
  alignas(64) WeightTile weights[kBlocks];
  const uint8_t *scales, *codes;  // of the panel
  int64_t first_block = 0;

  Q8Slab(const uint8_t* panel, int64_t k) : scales(panel), codes(panel + q8_panel_scale_bytes(k)) {}

  void decode(int64_t first, int64_t num_blocks) {
    first_block = first;
    const uint8_t* from = codes + first * (kBlock * kLanes);
    for (int64_t b = 0; b < num_blocks; ++b)
      for (int j = 0; j < kBlock / 4; ++j, from += 64) {
        __builtin_prefetch(from + kPrefetchBytes);
        const Q8Quad quad = load_q8_quad(from);
        _mm512_store_si512(weights[b][2 * j], q8_bf16(quad, 0));
        _mm512_store_si512(weights[b][2 * j + 1], q8_bf16(quad, 1));
      }
  }

  __m512 add(int64_t b, const float* sums, float, __m512 total) const {
    const bf16* block = reinterpret_cast<const bf16*>(scales) + (first_block + b) * kLanes;
    return _mm512_fmadd_ps(load(block).v, _mm512_load_ps(sums), total);
  }
};

constexpr int64_t kMaxSlabRows = 128;

// Up to kMaxSlabRows rows of the chunk times one panel.
template <class Tiles>
void q8_panel_tiles(const Tiles& a, int64_t row, int64_t num_rows, int64_t panel) {
  const int64_t whole = a.k / kTileColumns, rest = a.k % kTileColumns;
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  Q8Slab slab(a.weight + panel * q8_panel_bytes(a.k), a.k);
  alignas(64) float sums[kMaxSlabRows][kLanes];
  for (int64_t t = 0; t < num_rows; ++t) _mm512_store_ps(sums[t], _mm512_setzero_ps());
  slab_dot(slab, 0, whole, {x, a.x_stride}, num_rows, sums);
  if (rest > 0) {
    bf16 last[kMaxSlabRows][kTileColumns] = {};
    for (int64_t t = 0; t < num_rows; ++t)
      for (int64_t i = 0; i < rest; ++i) last[t][i] = x[t * a.x_stride + whole * kTileColumns + i];
    tile_memory_written(last);
    slab_dot(slab, whole, whole + 1, {last[0], kTileColumns}, num_rows, sums);
  }
  for (int64_t t = 0; t < num_rows; ++t) a.store(row + t, panel, load(sums[t]));
}

template <class Tiles>
void run_q8_tiles(const Tiles& a, const LinearChunk& c) {
  const int64_t num_rows = c.row_end - c.row_begin;
  if (num_rows == 0) return;
  if (num_rows <= Q8Panels::kFewRows) return run_rows<Q8Panels>(a, c);
  for (int64_t panel = c.panel_begin; panel < c.panel_end; ++panel)
    for (int64_t row = c.row_begin; row < c.row_end; row += kMaxSlabRows) {
      const int64_t rows = c.row_end - row < kMaxSlabRows ? c.row_end - row : kMaxSlabRows;
      q8_panel_tiles(a, row, rows, panel);
    }
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
