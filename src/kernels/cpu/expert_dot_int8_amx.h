// Computes  expert_dot_int8 for MXFP4 and 8 to 128 rows, with AMX tiles: one tdpbssd computes the sums over a
//           block of 32 columns for 16 rows and one panel; the sums are stored from the tile and then scaled.
//           Eight blocks of one or two panels are decoded to bytes at a time and used for all rows.
// Bytes     the panels once; x from the L2 cache, once for two panels.
// Flops     2 T N K; per 16 rows and block, a product of 16 cycles, 16 cycles to store the sums, 5 to 20 for
//           loads, and 48 vector operations.
// Bound     memory up to 12 rows; then the sum of all these costs, which do not overlap.
// Numerics  bit for bit like expert_dot_int8_avx512.h.
#pragma once

#include "kernels/cpu/expert_dot_amx.h"
#include "kernels/cpu/expert_dot_int8_avx512.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int64_t kMinInt8TileRows = 8;  // fewer rows are faster with byte dots
constexpr int kBlocksAtOnce = 8;         // 4 are as fast, but 16 exceed the L1 cache
constexpr int64_t kInt8TilePrefetchBytes = 3 << 10;
constexpr int kBlockColumns = 32, kBlockTileBytes = kBlockColumns * kPanelRows;

// Decoded weights of some blocks of a panel.
struct Int8Weights {
  alignas(64) int8_t tiles[kBlocksAtOnce][kBlockTileBytes];
  __m512 scales[kBlocksAtOnce];

  // Decodes num_blocks blocks. Values are doubled; scales are halved.
  void decode(const uint8_t* block_scales_at, const uint8_t* codes, int64_t num_blocks) {
    const __m512i twelve = _mm512_set1_epi8(12);
    const __m512i doubled = _mm512_sub_epi8(_mm512_load_si512(kCodeDoubled), twelve);
    for (int64_t b = 0; b < num_blocks; ++b, codes += kBlockTileBytes / 2) {
      const __m512 scale = block_scales<Fp4Format::kMxfp4>(block_scales_at + b * kPanelRows);
      scales[b] = _mm512_mul_ps(scale, _mm512_set1_ps(0.5f));
#pragma GCC unroll 4
      for (int j = 0; j < kBlockColumns / 8; ++j) {
        const __m512i words = _mm512_load_si512(codes + 64 * j);
        _mm512_store_si512(tiles[b] + 128 * j, _mm512_permutexvar_epi8(words, doubled));
        const __m512i high = _mm512_srli_epi16(words, 4);
        _mm512_store_si512(tiles[b] + 128 * j + 64, _mm512_permutexvar_epi8(high, doubled));
      }
    }
    tile_memory_written(this);
  }
};

// Sums of some blocks, stored from the tiles.
struct Int8Sums {
  alignas(64) int32_t blocks[kBlocksAtOnce][kTileRows][kPanelRows];
};

// Multiplies block b of x, whose rows are k bytes apart, by P panels' weights.
template <int P>
inline void multiply_block(int b, const int8_t* x, int64_t k, const Int8Weights* weights, Int8Sums* sums) {
  _tile_loadd(4, x, k);
  _tile_zero(0);
  _tile_loadd(6, weights[0].tiles[b], 64);
  _tile_dpbssd(0, 4, 6);
  if constexpr (P == 2) {
    _tile_zero(1);
    _tile_loadd(7, weights[1].tiles[b], 64);
    _tile_dpbssd(1, 4, 7);
  }
  _tile_stored(0, sums[0].blocks[b], 64);
  if constexpr (P == 2) _tile_stored(1, sums[1].blocks[b], 64);
}

// A chunk's panels and all rows of x.
struct Int8PanelRows {
  const uint8_t* panels;
  int64_t panel_bytes, k;
  const int8_t* x;  // [rows, K]
  Int8Blocks x_blocks;
  RowTiles rows;
};

// Adds row tile i's scaled sums over N blocks, beginning with block `first`, to the rows' totals.
template <int N>
void add_scaled(const Int8PanelRows& a, int64_t i, int64_t first, const Int8Weights& weights,
                const Int8Sums& sums, float (*totals)[kPanelRows]) {
  const int64_t num_blocks = a.k / kBlockColumns, height = a.rows.height;
  const float* x_scales = a.x_blocks.scales + a.rows.first(i) * num_blocks + first;
  totals += a.rows.first(i);
  for (int64_t t = a.rows.done(i); t < height; ++t) {
    __m512 total = _mm512_loadu_ps(totals[t]);
#pragma GCC unroll 8
    for (int b = 0; b < N; ++b) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.blocks[b][t]));
      const __m512 x_scale = _mm512_set1_ps(x_scales[t * num_blocks + b]);
      total = _mm512_fmadd_ps(weights.scales[b], _mm512_mul_ps(sum, x_scale), total);
    }
    _mm512_storeu_ps(totals[t], total);
  }
}

template <int N>
constexpr auto add_scaled_of(int blocks) {
  if constexpr (N == 1)
    return add_scaled<1>;
  else
    return blocks == N ? add_scaled<N> : add_scaled_of<N - 1>(blocks);
}

// Prefetches the bytes kInt8TilePrefetchBytes past `place` in each of P panels; near the panels' ends,
// prefetches the first bytes of the next P panels.
template <int P>
inline void prefetch_panels(const Int8PanelRows& a, int64_t place, int64_t bytes) {
  int64_t ahead = place + kInt8TilePrefetchBytes;
  if (ahead >= a.panel_bytes) ahead += (P - 1) * a.panel_bytes;
  for (int p = 0; p < P; ++p)
    for (int64_t at = 0; at < bytes; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(a.panels + p * a.panel_bytes + ahead + at), _MM_HINT_T0);
}

// Computes out[p][t][r] for P panels.
template <int P>
void expert_dot_int8_panels(const Int8PanelRows& a, TokenSums* out) {
  const int64_t num_blocks = a.k / kBlockColumns,
                scale_bytes = expert_panel_scale_bytes(Fp4Format::kMxfp4, a.k);
  prefetch_panels<P>(a, 0, scale_bytes);
  for (int p = 0; p < P; ++p)
    for (int64_t t = 0; t < a.rows.num_rows; ++t) _mm512_storeu_ps(out[p][t], _mm512_setzero_ps());
  Int8Weights weights[P];
  Int8Sums sums[P];
  for (int64_t first = 0; first < num_blocks; first += kBlocksAtOnce) {
    const int blocks = num_blocks - first < kBlocksAtOnce ? int(num_blocks - first) : kBlocksAtOnce;
    for (int p = 0; p < P; ++p) {
      const uint8_t* panel = a.panels + p * a.panel_bytes;
      weights[p].decode(panel + first * kPanelRows, panel + scale_bytes + first * (kBlockTileBytes / 2),
                        blocks);
    }
    const auto add = add_scaled_of<kBlocksAtOnce>(blocks);
    for (int64_t i = 0; i < a.rows.count; ++i) {
      const int8_t* x = a.x + a.rows.first(i) * a.k + first * kBlockColumns;
      for (int b = 0; b < blocks; ++b) {
        if (i == 0)
          prefetch_panels<P>(a, scale_bytes + (first + b) * (kBlockTileBytes / 2), kBlockTileBytes / 2);
        multiply_block<P>(b, x + b * kBlockColumns, a.k, weights, sums);
      }
      tile_memory_written(sums);
      for (int p = 0; p < P; ++p) add(a, i, first, weights[p], sums[p], out[p]);
    }
  }
}

// Computes out[p][t][r] for num_panels <= 2 panels p. The caller has configured the tiles.
inline void expert_dot_int8_tiles(const Int8PanelRows& a, int64_t num_panels, TokenSums* out) {
  num_panels == 2 ? expert_dot_int8_panels<2>(a, out) : expert_dot_int8_panels<1>(a, out);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
