// linear_chunk for bf16 rows and 8-bit weights on CPUs with AMX.
// Computes  the same as linear_code_tile.h. A slab (some blocks of a panel) is decoded exactly to bf16, then
//           multiplied by all rows of x, 16 at a time. A block's sums are stored from their tile and then
//           scaled.
// Bytes     as there, once for all rows of a chunk.
// Flops     2 T N K.
// Bound     memory for a few rows; then loading x from the L2 cache and storing the tiles.
// Numerics  one tdpbf16ps computes the sum of 32 columns: even and odd k are each summed from 0 in ascending
//           order, then the two sums are added; total = fma(scale, sum, total), in ascending block order, for
//           every number of rows.
#pragma once

#include "kernels/cpu/linear_rows_amx.h"
#include "kernels/cpu/q8_panel.h"
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kSlabBlocks = 8;  // of kTileColumns columns; half as many for up to two row tiles
constexpr int kInFlight = 4;    // blocks whose sums are in tiles or being stored
constexpr int64_t kMaxSlabRows = 128;

template <class Tiles>
struct CodeSlab {
  using Codes = typename Tiles::Codes;
  static constexpr int64_t kPrefetchBytes = 8192;
  alignas(64) WeightTile weights[kSlabBlocks];
  const Tiles& tiles;
  int64_t panel;
  const uint8_t* codes = tiles.codes(panel);
  int64_t first = 0, num_blocks = 0;

  CodeSlab(const Tiles& a, int64_t panel_index) : tiles(a), panel(panel_index) {}

  // Decodes blocks first_block .. first_block + blocks - 1.
  void decode(int64_t first_block, int64_t blocks) {
    first = first_block;
    num_blocks = blocks;
    const uint8_t* from = codes + first * (kTileColumns * kLanes);
    for (int64_t b = 0; b < num_blocks; ++b)
      for (int j = 0; j < kTileColumns / 4; ++j, from += 64) {
        __builtin_prefetch(from + kPrefetchBytes);
        const CodeQuad<Codes> quad = load_quad<Codes>(from);
        _mm512_store_si512(weights[b][2 * j], quad_bf16(quad, 0));
        _mm512_store_si512(weights[b][2 * j + 1], quad_bf16(quad, 1));
      }
    tile_memory_written(weights);
  }

  Vec scales(int64_t b) const { return tiles.scales(panel, first + b); }
};

// Multiplies NT rows of x by a slab. Tile numbers are part of the instructions: blocks 4 i + C use tile C for
// their sums.
template <class Slab, int NT>
class SlabRows {
 public:
  SlabRows(const Slab& slab, const bf16* x, const bf16* next, int64_t stride)
      : slab_(slab), x_(x), next_(next), stride_(stride) {}

  // Adds the slab's products to the rows' totals, except for the first `done` rows, which the previous tile
  // has updated.
  void add_to(float (*out)[kLanes], int64_t done) {
    Vec totals[NT];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) totals[t] = load(out[t]);
    for (int64_t b = 0; b < slab_.num_blocks + kInFlight; b += kInFlight) {
      step<0>(b, totals);
      step<1>(b + 1, totals);
      step<2>(b + 2, totals);
      step<3>(b + 3, totals);
    }
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
      if (t >= done) store(out[t], totals[t]);
  }

 private:
  // Starts block b, stores the sums of block b - 3 from their tile, and adds those of block b - 4.
  template <int C>
  void step(int64_t b, Vec (&totals)[NT]) {
    const int64_t blocks = slab_.num_blocks;
    if (b < blocks) multiply<C>(b);
    if (b >= kInFlight - 1 && b < blocks + kInFlight - 1) leave_tile<(C + 1) % kInFlight>();
    if (b >= kInFlight && b < blocks + kInFlight) {
      const Vec scales = slab_.scales(b - kInFlight);
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) totals[t] = fma(scales, load(sums_[C][t]), totals[t]);
    }
  }

  template <int C>
  void multiply(int64_t b) {
    const bf16* x = x_ + b * kTileColumns;
    const auto& w = slab_.weights[b];
    if constexpr (C % 2 == 0) {
      _tile_loadd(4, x, 2 * stride_);
      _tile_loadd(6, w, 64);
    } else {
      _tile_loadd(5, x, 2 * stride_);
      _tile_loadd(7, w, 64);
    }
    if constexpr (C == 0) {
      _tile_zero(0);
      _tile_dpbf16ps(0, 4, 6);
    } else if constexpr (C == 1) {
      _tile_zero(1);
      _tile_dpbf16ps(1, 5, 7);
    } else if constexpr (C == 2) {
      _tile_zero(2);
      _tile_dpbf16ps(2, 4, 6);
    } else {
      _tile_zero(3);
      _tile_dpbf16ps(3, 5, 7);
    }
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) __builtin_prefetch(next_ + t * stride_ + b * kTileColumns);
  }

  template <int C>
  void leave_tile() {
    if constexpr (C == 0)
      _tile_stored(0, sums_[0], 64);
    else if constexpr (C == 1)
      _tile_stored(1, sums_[1], 64);
    else if constexpr (C == 2)
      _tile_stored(2, sums_[2], 64);
    else
      _tile_stored(3, sums_[3], 64);
  }

  const Slab& slab_;
  const bf16 *x_, *next_;  // next_: the rows to prefetch for the caller's next step
  int64_t stride_;
  alignas(64) float sums_[kInFlight][NT][kLanes];
};

template <class Slab>
using AddSlab = void (*)(const Slab&, const bf16* x, const bf16* next, int64_t stride, int64_t done,
                         float (*out)[kLanes]);

// Returns a function that runs SlabRows<num_rows>, 1 <= num_rows <= NT.
template <class Slab, int NT = kTileRows>
AddSlab<Slab> add_slab_of(int64_t num_rows) {
  if constexpr (NT > 1)
    if (num_rows < NT) return add_slab_of<Slab, NT - 1>(num_rows);
  return [](const Slab& slab, const bf16* x, const bf16* next, int64_t stride, int64_t done,
            float(*out)[kLanes]) { SlabRows<Slab, NT>(slab, x, next, stride).add_to(out, done); };
}

// Adds x[t] times the panel to out[t], over blocks first .. last - 1; x begins at block `first`.
template <class Slab>
inline void add_blocks(Slab& slab, int64_t first, int64_t last, const bf16* x, int64_t stride,
                       const RowTiles& rows, float (*out)[kLanes]) {
  const AddSlab<Slab> add = add_slab_of<Slab>(rows.height);
  const int64_t blocks = rows.count > 2 ? kSlabBlocks : kSlabBlocks / 2;
  for (int64_t b = first; b < last; b += blocks) {
    slab.decode(b, last - b < blocks ? last - b : blocks);
    const bf16* columns = x + (b - first) * kTileColumns;
    for (int64_t i = 0; i < rows.count; ++i) {
      const bf16* next =
          i + 1 < rows.count ? columns + rows.first(i + 1) * stride : columns + blocks * kTileColumns;
      add(slab, columns + rows.first(i) * stride, next, stride, rows.done(i), out + rows.first(i));
    }
  }
}

// Multiplies up to kMaxSlabRows rows of the chunk by one panel.
template <class Tiles>
void code_panel_tiles(const Tiles& a, int64_t row, int64_t num_rows, int64_t panel) {
  const int64_t whole = a.k / kTileColumns, rest = a.k % kTileColumns;
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  CodeSlab<Tiles> slab(a, panel);
  alignas(64) float sums[kMaxSlabRows][kLanes];
  for (int64_t t = 0; t < num_rows; ++t) store(sums[t], zero());
  const RowTiles rows(num_rows);
  configure_tiles(rows.height, 2 * kTileColumns);
  add_blocks(slab, 0, whole, x, a.x_stride, rows, sums);
  if (rest > 0) {
    bf16 last[kMaxSlabRows][kTileColumns] = {};
    for (int64_t t = 0; t < num_rows; ++t)
      for (int64_t i = 0; i < rest; ++i) last[t][i] = x[t * a.x_stride + whole * kTileColumns + i];
    tile_memory_written(last);
    add_blocks(slab, whole, whole + 1, last[0], kTileColumns, rows, sums);
  }
  _tile_release();
  for (int64_t t = 0; t < num_rows; ++t) a.store(row + t, panel, load(sums[t]));
}

template <class Tiles>
void run_code_tiles(const Tiles& a, const LinearChunk& c) {
  const int64_t num_rows = c.row_end - c.row_begin;
  if (num_rows == 0) return;
  if (num_rows <= CodePanels<Tiles>::kFewRows) return run_rows<CodePanels<Tiles>>(a, c);
  for (int64_t panel = c.panel_begin; panel < c.panel_end; ++panel)
    for (int64_t row = c.row_begin; row < c.row_end; row += kMaxSlabRows) {
      const int64_t rows = c.row_end - row < kMaxSlabRows ? c.row_end - row : kMaxSlabRows;
      code_panel_tiles(a, row, rows, panel);
    }
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
