#include "moe/device/bf16_tiles.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/layout/tile_layout.h"

namespace fp4moe {
namespace {

constexpr int64_t kBf16TileBytes = tile_bytes(Fp4Format::kNone);

// Writes the tile that begins at column `first_col` of row tile `row_tile`; it is zero before.
void pack_side(const Bf16MatrixView& m, RowOrder order, int64_t row_tile, int64_t first_col, bf16* tile) {
  const int64_t side_rows = order == RowOrder::kPlain ? kTileRows : kTileRows / 2;
  const int64_t first_row = row_tile * side_rows, rows = std::min(side_rows, m.rows - first_row);
  const int64_t cols = std::min(kTileCols, m.cols - first_col);
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < rows; ++r)
      tile[bf16_tile_place(tile_row(order, r), c)] =
          m.data[(first_row + r) * m.row_stride + (first_col + c) * m.col_stride];
}

}  // namespace

void pack_bf16_tiles(const Bf16TileRows& matrix, uint8_t* tiles, ThreadPool& pool) {
  const Bf16MatrixView& m = *matrix.rows;
  const Bf16MatrixView* gate = matrix.gate;
  const int64_t row_tiles = num_tiles((gate == nullptr ? 1 : 2) * m.rows), k_tiles = num_tiles(m.cols);
  pool.run(row_tiles * k_tiles, [&](int64_t i, int) {
    const int64_t row_tile = i / k_tiles, k_tile = i % k_tiles;
    uint8_t* to = tiles + tile_index(row_tiles, k_tiles, row_tile, k_tile) * kBf16TileBytes;
    std::memset(to, 0, static_cast<size_t>(kBf16TileBytes));
    bf16* tile = reinterpret_cast<bf16*>(to);
    if (gate != nullptr) pack_side(*gate, RowOrder::kGate, row_tile, k_tile * kTileCols, tile);
    pack_side(m, gate == nullptr ? RowOrder::kPlain : RowOrder::kUp, row_tile, k_tile * kTileCols, tile);
  });
}

}  // namespace fp4moe
