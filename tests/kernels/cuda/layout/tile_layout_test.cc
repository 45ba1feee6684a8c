// Compares tiles with the matrices they were packed from: every element, both formats, odd sizes.
#include "kernels/cuda/layout/tile_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "kernels/cuda/layout/host_tiles.h"

namespace fp4moe {
namespace {

struct Matrix {
  std::vector<uint8_t> codes, scales;
  Fp4MatrixView view;
};

Matrix random_matrix(Fp4Format format, int64_t rows, int64_t cols, uint32_t seed, int scale_low,
                     int scale_high) {
  std::mt19937 rng(seed);
  const int block = fp4_block(format);
  Matrix m;
  m.codes.resize(static_cast<size_t>(rows * cols / 2));
  m.scales.resize(static_cast<size_t>(rows * cols / block));
  for (uint8_t& b : m.codes) b = static_cast<uint8_t>(rng());
  std::uniform_int_distribution<int> scale(scale_low, scale_high);
  for (uint8_t& b : m.scales) b = static_cast<uint8_t>(scale(rng));
  m.view = {format, rows, cols, m.codes.data(), m.scales.data(), cols / 2, cols / block, 1.0f};
  return m;
}

class TileLayout : public testing::TestWithParam<Fp4Format> {
 protected:
  // All e4m3 scales, including zero and subnormals; 120 octaves of e8m0.
  int low() const { return GetParam() == Fp4Format::kMxfp4 ? 30 : 0; }
  int high() const { return GetParam() == Fp4Format::kMxfp4 ? 150 : 0x7e; }
};

TEST_P(TileLayout, HoldsEveryWeightExactly) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{64, 64}, {96, 160}, {40, 32}, {129, 2880}, {650, 160}}) {
    const Matrix m = random_matrix(GetParam(), rows, cols, 1, low(), high());
    std::vector<uint8_t> tiles(static_cast<size_t>(tiled_bytes(GetParam(), rows, cols)), 0xee);
    const Result<float> factor = pack_tiles(m.view, tiles.data());
    ASSERT_TRUE(factor.ok()) << factor.status().message();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        ASSERT_EQ(tiled_at(GetParam(), tiles.data(), rows, cols, r, c) * *factor, fp4_at(m.view, r, c))
            << r << ", " << c;
    for (int64_t r = 0; r < num_tiles(rows) * kTileRows; ++r)
      for (int64_t c = 0; c < num_tiles(cols) * kTileCols; ++c)
        if (r >= rows || c >= cols) {
          ASSERT_EQ(tiled_at(GetParam(), tiles.data(), rows, cols, r, c), 0.0f);
        }
  }
}

TEST(TileIndex, OfEveryPlaceIsDifferentAndAGroupsTilesAreNeighbours) {
  for (const int64_t row_tiles : {1, 5, 8, 10, 16, 45})
    for (const int64_t k_tiles : {1, 3}) {
      std::set<int64_t> seen;
      for (int64_t r = 0; r < row_tiles; ++r)
        for (int64_t k = 0; k < k_tiles; ++k) {
          const int64_t index = tile_index(row_tiles, k_tiles, r, k), group = tile_group_size(row_tiles, r);
          seen.insert(index);
          EXPECT_EQ(index, tile_index(row_tiles, k_tiles, r / 8 * 8, k) + r % 8);
          EXPECT_EQ(group, std::min<int64_t>(8, row_tiles - r / 8 * 8));
          if (k > 0) {
            EXPECT_EQ(index, tile_index(row_tiles, k_tiles, r, k - 1) + group);
          }
        }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), row_tiles * k_tiles);
      EXPECT_EQ(*seen.rbegin(), row_tiles * k_tiles - 1);
    }
}

TEST_P(TileLayout, GateAndUpOfOneRowMeetInOneThread) {
  const int64_t n = 96, k = 128;
  const Matrix gate = random_matrix(GetParam(), n, k, 2, low(), high() - 20);
  const Matrix up = random_matrix(GetParam(), n, k, 3, low() + 4, high());
  std::vector<uint8_t> tiles(static_cast<size_t>(tiled_bytes(GetParam(), 2 * n, k)));
  const Result<GateUpFactors> f = pack_gate_up_tiles(gate.view, up.view, tiles.data());
  ASSERT_TRUE(f.ok());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < k; ++c) {
      const int64_t row = i / 32 * 64 + i % 32 / 8 * 16 + i % 8;
      ASSERT_EQ(tiled_at(GetParam(), tiles.data(), 2 * n, k, row, c) * f->gate, fp4_at(gate.view, i, c));
      ASSERT_EQ(tiled_at(GetParam(), tiles.data(), 2 * n, k, row + 8, c) * f->up, fp4_at(up.view, i, c));
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, TileLayout, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                         [](const auto& p) { return std::string(fp4_format_name(p.param)); });

TEST(TileLayoutMxfp4, ScalesTooFarApartAreRefused) {
  Matrix m = random_matrix(Fp4Format::kMxfp4, 64, 64, 4, 100, 100);
  m.codes.assign(m.codes.size(), 0x11);
  m.scales[0] = 1;
  m.scales[1] = 200;
  std::vector<uint8_t> tiles(static_cast<size_t>(tiled_bytes(Fp4Format::kMxfp4, 64, 64)));
  const Result<float> f = pack_tiles(m.view, tiles.data());
  ASSERT_FALSE(f.ok());
  EXPECT_NE(f.status().message().find("199 octaves"), std::string::npos) << f.status().message();
}

TEST(TileLayoutMxfp4, ScalesOfZeroGroupsDoNotCount) {
  Matrix m = random_matrix(Fp4Format::kMxfp4, 64, 64, 5, 100, 100);
  m.codes.assign(m.codes.size(), 0x11);
  for (size_t i = 0; i < 16; ++i) m.codes[i] = 0x80;
  m.scales[0] = 1;
  m.scales[1] = 200;
  std::vector<uint8_t> tiles(static_cast<size_t>(tiled_bytes(Fp4Format::kMxfp4, 64, 64)));
  const Result<float> f = pack_tiles(m.view, tiles.data());
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(tiled_at(Fp4Format::kMxfp4, tiles.data(), 64, 64, 0, 0), 0.0f);
  EXPECT_EQ(tiled_at(Fp4Format::kMxfp4, tiles.data(), 64, 64, 1, 0) * *f, 0x1p-28f);
}

}  // namespace
}  // namespace fp4moe
