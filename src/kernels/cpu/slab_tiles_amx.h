// Rows of x times a panel of 16 outputs by AMX tiles, where the sums of each block of columns leave their
// tile for a scale in FP32. A slab of the panel, some blocks, is decoded; then all rows of x pass over it, 16
// at a time.
//
//   Slab::X kBlock kBlocks               elements of x; columns of a block, blocks of a slab
//   weights[kBlocks]                     weight tiles of X
//   decode(first, num_blocks)            fills the slab from block `first` on
//   add(b, sums, x_scale, total)         total + block b's 16 sums of one row (float or int32_t), scaled
#pragma once

#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kInFlight = 4;  // blocks whose sums are in tiles or on their way

// A slab's columns of some rows of x, and the scales of their blocks (null: none).
template <class X>
struct SlabColumns {
  const X* x;
  int64_t stride;
  const float* scales = nullptr;
  int64_t scale_stride = 0;
};

// What a tile instruction works on is part of its code: blocks 4 i + C use tile C for their sums.
template <int C, class X>
inline void start_block(const X* x, int64_t stride_bytes, const void* w) {
  if constexpr (C % 2 == 0) {
    _tile_loadd(4, x, stride_bytes);
    _tile_loadd(6, w, 64);
  } else {
    _tile_loadd(5, x, stride_bytes);
    _tile_loadd(7, w, 64);
  }
  if constexpr (C == 0) _tile_zero(0);
  if constexpr (C == 1) _tile_zero(1);
  if constexpr (C == 2) _tile_zero(2);
  if constexpr (C == 3) _tile_zero(3);
  if constexpr (sizeof(X) == 1) {
    if constexpr (C == 0) _tile_dpbusd(0, 4, 6);
    if constexpr (C == 1) _tile_dpbusd(1, 5, 7);
    if constexpr (C == 2) _tile_dpbusd(2, 4, 6);
    if constexpr (C == 3) _tile_dpbusd(3, 5, 7);
  } else {
    if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1) _tile_dpbf16ps(1, 5, 7);
    if constexpr (C == 2) _tile_dpbf16ps(2, 4, 6);
    if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
  }
}

template <int C>
inline void store_block(void* sums) {
  if constexpr (C == 0) _tile_stored(0, sums, 64);
  if constexpr (C == 1) _tile_stored(1, sums, 64);
  if constexpr (C == 2) _tile_stored(2, sums, 64);
  if constexpr (C == 3) _tile_stored(3, sums, 64);
}

template <class Slab, int NT>
class SlabRows {
 public:
  using X = typename Slab::X;

  SlabRows(const Slab& slab, int64_t blocks, const SlabColumns<X>& rows, const X* next)
      : slab_(slab), blocks_(blocks), rows_(rows), next_(next) {}

  // To the rows' totals, the first `done` of which have it already.
  void add_to(float (*out)[kTileRows], int64_t done) {
    __m512 totals[NT];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) totals[t] = _mm512_load_ps(out[t]);
    for (int64_t b = 0; b < blocks_ + kInFlight; b += kInFlight) {
      step<0>(b, totals);
      step<1>(b + 1, totals);
      step<2>(b + 2, totals);
      step<3>(b + 3, totals);
    }
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
      if (t >= done) _mm512_store_ps(out[t], totals[t]);
  }

 private:
  // Block b starts, the sums of the one three before leave their tile, those of four before are added.
  template <int C>
  void step(int64_t b, __m512 (&totals)[NT]) {
    if (b < blocks_) {
      start_block<C>(rows_.x + b * Slab::kBlock, rows_.stride * int64_t{sizeof(X)}, slab_.weights[b]);
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) __builtin_prefetch(next_ + t * rows_.stride + b * Slab::kBlock);
    }
    if (b >= kInFlight - 1 && b < blocks_ + kInFlight - 1)
      store_block<(C + 1) % kInFlight>(sums_[(C + 1) % kInFlight]);
    if (b >= kInFlight && b < blocks_ + kInFlight) add(b - kInFlight, sums_[C], totals);
  }

  void add(int64_t b, const float (*sums)[kTileRows], __m512 (&totals)[NT]) const {
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) {
      const float x_scale = rows_.scales == nullptr ? 1 : rows_.scales[t * rows_.scale_stride + b];
      totals[t] = slab_.add(b, sums[t], x_scale, totals[t]);
    }
  }

  const Slab& slab_;
  int64_t blocks_;
  SlabColumns<X> rows_;
  const X* next_;  // what the caller wants next, fetched meanwhile
  alignas(64) float sums_[kInFlight][NT][kTileRows];
};

template <class Slab>
using AddSlab = void (*)(const Slab&, int64_t blocks, const SlabColumns<typename Slab::X>&,
                         const typename Slab::X* next, int64_t done, float (*out)[kTileRows]);

// add_slab<num_rows>, 1 <= num_rows <= NT.
template <class Slab, int NT = kTileRows>
AddSlab<Slab> add_slab_of(int64_t num_rows) {
  if constexpr (NT > 1)
    if (num_rows < NT) return add_slab_of<Slab, NT - 1>(num_rows);
  return [](const Slab& slab, int64_t blocks, const SlabColumns<typename Slab::X>& rows,
            const typename Slab::X* next, int64_t done,
            float(*out)[kTileRows]) { SlabRows<Slab, NT>(slab, blocks, rows, next).add_to(out, done); };
}

// out[t][r] += x[t] times the panel's output r over blocks first .. last - 1, t < num_rows. x begins at block
// `first`.
template <class Slab>
void slab_dot(Slab& slab, int64_t first, int64_t last, const SlabColumns<typename Slab::X>& x,
              int64_t num_rows, float (*out)[kTileRows]) {
  const RowTiles tiles(num_rows);
  const AddSlab<Slab> add = add_slab_of<Slab>(tiles.height);
  configure_tiles(tiles.height, Slab::kBlock * static_cast<int>(sizeof(typename Slab::X)));
  for (int64_t b = first; b < last; b += Slab::kBlocks) {
    const int64_t blocks = last - b < Slab::kBlocks ? last - b : Slab::kBlocks;
    slab.decode(b, blocks);
    tile_memory_written(&slab);
    const auto columns_of = [&](int64_t row) {
      SlabColumns<typename Slab::X> columns = x;
      columns.x += row * x.stride + (b - first) * Slab::kBlock;
      if (x.scales != nullptr) columns.scales += row * x.scale_stride + b - first;
      return columns;
    };
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t row = tiles.first(i);
      const auto* next = i + 1 < tiles.count ? columns_of(tiles.first(i + 1)).x
                                             : columns_of(0).x + Slab::kBlocks * Slab::kBlock;
      add(slab, blocks, columns_of(row), next, tiles.done(i), out + row);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
