// Computes  out[t, r] = sum over k of x[t, k] * w[r, k] for the 16 rows r of a panel, x bf16, by AMX tiles.
//           A slab of the panel is decoded once into the layout of weight tiles, then all rows of x pass over
//           it, 16 at a time.
// Bytes     the panel once for up to 128 rows of x; x once for each panel, from the L2 cache.
// Flops     32 T K.
// Bound     memory for a few rows; then the way out of the tiles: a block's sums leave by 16 stores for each
//           tdpbf16ps, which alone would run twice as fast.
// Numerics  one tdpbf16ps makes the sums of a block: even and odd columns each start at 0 and ascend, and are
//           added. The sums meet the block scale in FP32, so that no scale byte is a special case. The order
//           is the same for every number of rows.
#pragma once

#include "kernels/cpu/expert_dot_avx512.h"
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kMaxTileTokens = 128;  // their totals, a slab and its columns of 16 rows stay in the L1 cache
constexpr int kSlabColumns = 256;
constexpr int kInFlight = 4;  // blocks whose sums are in tiles or on their way

template <Fp4Format F>
struct Slab {
  static constexpr int kBlock = fp4_block(F), kBlocks = kSlabColumns / kBlock, kCodeBytes = kBlock / 8 * 64;
  alignas(64) uint16_t weights[kBlocks][kBlock / 2][2 * kPanelRows];
  alignas(64) float scales[kBlocks][kPanelRows];

  void decode(const uint8_t* scale_bytes, const uint8_t* codes, int64_t num_blocks) {
    const __m512i table = _mm512_load_si512(kCodeBf16);
    for (int64_t b = 0; b < num_blocks; ++b, codes += kCodeBytes) {
      for (int j = 0; j < kBlock / 8; ++j) {
        _mm_prefetch(reinterpret_cast<const char*>(codes + 64 * j + kPrefetchBytes), _MM_HINT_T0);
        const __m512i words = _mm512_load_si512(codes + 64 * j);
        for (int i = 0; i < 4; ++i)
          _mm512_store_si512(weights[b][4 * j + i],
                             _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * i), table));
      }
      _mm512_store_ps(scales[b], block_scales<F>(scale_bytes + b * kPanelRows));
    }
    tile_memory_written(this);
  }
};

// A slab's columns of NT rows of x. What a tile instruction works on is part of its code: blocks 4 i + C use
// tile C for their sums.
template <Fp4Format F, int NT>
class SlabRows {
 public:
  SlabRows(const Slab<F>& slab, int64_t blocks, const bf16* x, const bf16* next, int64_t k)
      : slab_(slab), blocks_(blocks), x_(x), next_(next), k_(k) {}

  // To the rows' totals, the first `done` of which have it already.
  void add_to(float (*out)[kPanelRows], int64_t done) {
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
    if (b < blocks_) multiply<C>(b);
    if (b >= kInFlight - 1 && b < blocks_ + kInFlight - 1) leave_tile<(C + 1) % kInFlight>();
    if (b >= kInFlight) add<C>(b - kInFlight, totals);
  }

  template <int C>
  void multiply(int64_t b) {
    const bf16* x = x_ + b * Slab<F>::kBlock;
    const auto& w = slab_.weights[b];
    if constexpr (C % 2 == 0) {
      _tile_loadd(4, x, 2 * k_);
      _tile_loadd(6, w, 64);
    } else {
      _tile_loadd(5, x, 2 * k_);
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
    for (int t = 0; t < NT; ++t) __builtin_prefetch(next_ + t * k_ + b * Slab<F>::kBlock);
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

  template <int C>
  void add(int64_t b, __m512 (&totals)[NT]) {
    if (b >= blocks_) return;
    const __m512 scale = _mm512_load_ps(slab_.scales[b]);
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) totals[t] = _mm512_fmadd_ps(scale, _mm512_load_ps(sums_[C][t]), totals[t]);
  }

  const Slab<F>& slab_;
  int64_t blocks_;
  const bf16 *x_, *next_;  // next_: what the caller wants next, fetched meanwhile
  int64_t k_;
  alignas(64) float sums_[kInFlight][NT][kPanelRows];
};

template <Fp4Format F>
using AddSlab = void (*)(const Slab<F>&, int64_t blocks, const bf16* x, const bf16* next, int64_t k,
                         int64_t done, float (*out)[kPanelRows]);

template <Fp4Format F, int NT>
void add_slab(const Slab<F>& slab, int64_t blocks, const bf16* x, const bf16* next, int64_t k, int64_t done,
              float (*out)[kPanelRows]) {
  SlabRows<F, NT>(slab, blocks, x, next, k).add_to(out, done);
}

// add_slab<num_rows>, 1 <= num_rows <= NT.
template <Fp4Format F, int NT = kTileRows>
AddSlab<F> add_slab_of(int64_t num_rows) {
  if constexpr (NT > 1)
    if (num_rows < NT) return add_slab_of<F, NT - 1>(num_rows);
  return add_slab<F, NT>;
}

// out[t][r] = sum over k of x[t, k] * w[r, k], t < num_rows <= kMaxTileTokens.
template <Fp4Format F>
void expert_dot_tiles(const uint8_t* panel, int64_t k, const void* rows, int64_t num_rows, const float*,
                      float (*out)[kPanelRows]) {
  using S = Slab<F>;
  S slab;
  const int64_t num_blocks = k / S::kBlock;
  const RowTiles tiles(num_rows);
  const AddSlab<F> add = add_slab_of<F>(tiles.height);
  const uint8_t* codes = panel + expert_panel_scale_bytes(F, k);
  for (int64_t t = 0; t < num_rows; ++t) _mm512_store_ps(out[t], _mm512_setzero_ps());
  configure_tiles(tiles.height, 2 * S::kBlock);
  for (int64_t b = 0; b < num_blocks; b += S::kBlocks) {
    const int64_t blocks = num_blocks - b < S::kBlocks ? num_blocks - b : S::kBlocks;
    const bf16* x = static_cast<const bf16*>(rows) + b * S::kBlock;
    slab.decode(panel + b * kPanelRows, codes + b * S::kCodeBytes, blocks);
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t first = tiles.first(i);
      const bf16* next = i + 1 < tiles.count ? x + tiles.first(i + 1) * k : x + kSlabColumns;
      add(slab, blocks, x + first * k, next, k, tiles.done(i), out + first);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
