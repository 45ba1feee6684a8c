// linear_chunk for up to four bf16 rows on CPUs with AMX: computes the sums of tdpbf16ps with FMA, which
// keeps more reads in flight than tile loads do. As with tiles, subnormals count as zero.
#pragma once

#include "kernels/cpu/linear_step.h"
#include "kernels/cpu/q8_panel.h"
#include "kernels/cpu/tiles_amx.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned saved_;
};

// Panels in either layout: every 64 bytes are kColumns columns of 16 outputs. For more than kFewRows rows,
// tiles are faster.
struct Bf16Panels {
  static constexpr int kColumns = 2, kFewRows = 4;
  static constexpr int64_t kPrefetchBytes = 2048;
  const uint8_t* weights;
  int64_t bytes;  // from one panel to the next

  template <class Tiles>
  Bf16Panels(const Tiles& a, int64_t panel) : bytes((a.k + 1) / 2 * 64) {
    weights = reinterpret_cast<const uint8_t*>(a.weight) + panel * bytes;
  }
  static VecPair pair(const uint8_t* w, int) { return load_pairs(reinterpret_cast<const bf16*>(w)); }
  Vec add_sum(int, int64_t, Vec sum, Vec total) const { return add(total, sum); }
};

template <class Tiles>
struct CodePanels {
  using Codes = typename Tiles::Codes;
  static constexpr int kColumns = 4, kFewRows = 2;
  static constexpr int64_t kPrefetchBytes = 4096;
  const Tiles& tiles;
  int64_t panel;  // the first
  const uint8_t* weights = tiles.codes(panel);
  int64_t bytes = tiles.panel_bytes;

  CodePanels(const Tiles& a, int64_t first) : tiles(a), panel(first) {}
  static VecPair pair(const uint8_t* w, int i) { return quad_floats(load_quad<Codes>(w), i); }
  Vec add_sum(int p, int64_t block, Vec sum, Vec total) const {
    return fma(tiles.scales(panel + p, block), sum, total);
  }
};

// The sums of R rows times P panels.
template <class Panels, int R, int P>
struct RowSums {
  const Panels& panels;
  Vec totals[P][R];

  // Adds a block to the totals. x points to its first column and has num_columns, a multiple of kColumns, in
  // each row.
  void add_block(int64_t block, const bf16* x, int64_t stride, int64_t num_columns) {
    const uint8_t* w = panels.weights + block * (kTileColumns / Panels::kColumns * 64);
    VecPair sums[P][R];
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r) sums[p][r] = {zero(), zero()};
    for (int64_t k = 0; k < num_columns; k += Panels::kColumns, w += 64) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) __builtin_prefetch(w + p * panels.bytes + Panels::kPrefetchBytes);
#pragma GCC unroll 2
      for (int i = 0; i < Panels::kColumns / 2; ++i) {
        VecPair two[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          int pair;
          __builtin_memcpy(&pair, x + r * stride + k + 2 * i, sizeof(pair));
          two[r] = split_pairs(_mm512_set1_epi32(pair));
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          const VecPair weights = Panels::pair(w + p * panels.bytes, i);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            sums[p][r].even = fma(two[r].even, weights.even, sums[p][r].even);
            sums[p][r].odd = fma(two[r].odd, weights.odd, sums[p][r].odd);
          }
        }
      }
    }
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        totals[p][r] = panels.add_sum(p, block, add(sums[p][r].even, sums[p][r].odd), totals[p][r]);
  }
};

// Multiplies rows row .. row + R - 1 by panels panel .. panel + P - 1. Not inlined, so that its arithmetic
// cannot move before FlushSubnormals.
template <class Panels, int R, int P, class Tiles>
[[gnu::noinline]] void linear_rows(const Tiles& a, int64_t row, int64_t panel) {
  const int64_t whole = a.k / kTileColumns, rest = a.k % kTileColumns;
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  const Panels panels(a, panel);
  RowSums<Panels, R, P> sums{panels, {}};
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) sums.totals[p][r] = zero();
  for (int64_t b = 0; b < whole; ++b) sums.add_block(b, x + b * kTileColumns, a.x_stride, kTileColumns);
  if (rest > 0) {
    bf16 last[R][kTileColumns] = {};
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < rest; ++i) last[r][i] = x[r * a.x_stride + whole * kTileColumns + i];
    constexpr int kColumns = Panels::kColumns;
    sums.add_block(whole, last[0], kTileColumns, (rest + kColumns - 1) / kColumns * kColumns);
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) a.store(row + r, panel + p, sums.totals[p][r]);
}

// Computes a whole chunk, which has at most R rows.
template <class Panels, int R = Panels::kFewRows, class Tiles>
void run_rows(const Tiles& a, const LinearChunk& c) {
  if constexpr (R > 1)
    if (c.row_end - c.row_begin < R) return run_rows<Panels, R - 1>(a, c);
  constexpr int kPanels = R <= 2 ? 4 : 2;
  const FlushSubnormals flush;
  int64_t panel = c.panel_begin;
  for (; panel + kPanels <= c.panel_end; panel += kPanels)
    linear_rows<Panels, R, kPanels>(a, c.row_begin, panel);
  for (; panel < c.panel_end; ++panel) linear_rows<Panels, R, 1>(a, c.row_begin, panel);
}

}  // namespace
}  // namespace fp4moe::FP4MOE_ISA
