// The tiles of bf16 experts, against the operand layout of m16n8k16 steps as tile_layout.h defines it.
#include "moe/device/bf16_tiles.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/layout/tile_layout.h"

namespace fp4moe {
namespace {

// A matrix whose elements are all different, stored by rows or by columns.
struct Matrix {
  int64_t rows, cols;
  std::vector<bf16> values;
  Bf16MatrixView view;

  Matrix(int64_t num_rows, int64_t num_cols, uint16_t first, bool transposed)
      : rows(num_rows), cols(num_cols) {
    for (int64_t i = 0; i < rows * cols; ++i) values.push_back({static_cast<uint16_t>(first + i)});
    view = {rows, cols, values.data(), transposed ? 1 : cols, transposed ? rows : 1};
  }
  uint16_t at(int64_t r, int64_t c) const {
    if (r >= rows || c >= cols) return 0;
    return values[static_cast<size_t>(r * view.row_stride + c * view.col_stride)].bits;
  }
};

struct Place {
  int64_t row, col, word;  // in the matrix of tiles; word: of its bf16
};

// Every element of a matrix of tiles, in the order of memory.
std::vector<Place> places(int64_t row_tiles, int64_t k_tiles) {
  std::vector<Place> all;
  for (int64_t row_tile = 0; row_tile < row_tiles; ++row_tile)
    for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile)
      for (int64_t i = 0; i < 64 * 64; ++i) {
        const int64_t h = i % 2, r = i / 2 % 4, lane = i / 8 % 32, step = i / 256 % 4, warp = i / 1024;
        all.push_back({row_tile * 64 + 16 * warp + lane / 4 + 8 * (r % 2),
                       k_tile * 64 + 16 * step + 2 * (lane % 4) + 8 * (r / 2) + h,
                       tile_index(row_tiles, k_tiles, row_tile, k_tile) * 64 * 64 + i});
      }
  return all;
}

std::vector<uint16_t> packed(const Bf16TileRows& matrix, int64_t rows, int64_t cols) {
  ThreadPool pool(3);
  std::vector<uint16_t> tiles(static_cast<size_t>(tiled_bytes(Fp4Format::kNone, rows, cols) / 2), 0xffff);
  pack_bf16_tiles(matrix, reinterpret_cast<uint8_t*>(tiles.data()), pool);
  return tiles;
}

TEST(Bf16Tiles, PlainMatricesOfEverySize) {
  for (const bool transposed : {false, true})
    for (const int64_t rows : {1, 31, 64, 65, 130, 600})
      for (const int64_t cols : {1, 32, 64, 96}) {
        const Matrix m(rows, cols, 1, transposed);
        const std::vector<uint16_t> tiles = packed({nullptr, &m.view}, rows, cols);
        for (const Place& p : places(num_tiles(rows), num_tiles(cols)))
          ASSERT_EQ(tiles[static_cast<size_t>(p.word)], m.at(p.row, p.col))
              << rows << " x " << cols << ": " << p.row << ", " << p.col;
      }
}

// Matrix row 64 j + 16 w + g is gate row 32 j + 8 w + g, and the row 8 further is the same row of up.
TEST(Bf16Tiles, GateAndUpAlternate) {
  for (const int64_t rows : {32, 64, 96, 288})
    for (const int64_t cols : {32, 96}) {
      const Matrix gate(rows, cols, 1, true), up(rows, cols, 30000, false);
      const std::vector<uint16_t> tiles = packed({&gate.view, &up.view}, 2 * rows, cols);
      for (const Place& p : places(num_tiles(2 * rows), num_tiles(cols))) {
        const int64_t source = p.row / 64 * 32 + p.row % 64 / 16 * 8 + p.row % 8;
        ASSERT_EQ(tiles[static_cast<size_t>(p.word)], (p.row % 16 < 8 ? gate : up).at(source, p.col))
            << rows << " x " << cols << ": " << p.row << ", " << p.col;
      }
    }
}

}  // namespace
}  // namespace fp4moe
