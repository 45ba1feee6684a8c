// Compares FP8 tiles and slabs with the matrices and rows they hold: every element, both formats, odd sizes.
// MXFP4 is exact; NVFP4 has the error that the header states.
#include "kernels/cuda/layout/fp8_tile_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/nvfp4.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/dense_case.h"

namespace fp4moe {
namespace {

struct Matrix {
  std::vector<uint8_t> codes, scales;
  Fp4MatrixView view;
};

Matrix random_matrix(Fp4Format format, int64_t rows, int64_t cols, uint64_t seed, int low, int high) {
  Random random(seed);
  const int block = fp4_block(format);
  Matrix m;
  m.codes.resize(static_cast<size_t>(rows * cols / 2));
  m.scales.resize(static_cast<size_t>(rows * cols / block));
  for (uint8_t& b : m.codes) b = static_cast<uint8_t>(random.integer(0, 255));
  for (uint8_t& b : m.scales) b = static_cast<uint8_t>(random.integer(low, high));
  m.view = {format, rows, cols, m.codes.data(), m.scales.data(), cols / 2, cols / block, 1.0f};
  return m;
}

std::vector<uint8_t> tiles_for(Fp4Format format, int64_t n, int64_t k) {
  return std::vector<uint8_t>(static_cast<size_t>(fp8_tiled_bytes(format, n, k)), 0xee);
}

// Checks a packed weight, which is exact for MXFP4 and rounded to four bits for NVFP4.
void expect_weight(Fp4Format format, float actual, float expected) {
  if (format == Fp4Format::kMxfp4)
    ASSERT_EQ(actual, expected);
  else
    ASSERT_NEAR(actual, expected, std::abs(expected) / 16);
}

class Fp8TileLayout : public testing::TestWithParam<Fp4Format> {
 protected:
  int low() const { return GetParam() == Fp4Format::kMxfp4 ? 113 : 0x38; }
  int high() const { return GetParam() == Fp4Format::kMxfp4 ? 127 : 0x7e; }
};

TEST_P(Fp8TileLayout, HoldsEveryWeight) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{64, 128}, {96, 160}, {40, 32}, {321, 2880}}) {
    const Matrix m = random_matrix(GetParam(), rows, cols, 1, low(), high());
    std::vector<uint8_t> tiles = tiles_for(GetParam(), rows, cols);
    ASSERT_TRUE(pack_fp8_tiles(m.view, tiles.data()).ok());
    for (int64_t r = 0; r < fp8_row_tiles(rows) * kFp8TileRows; ++r)
      for (int64_t c = 0; c < num_slabs(cols) * kFp8TileCols; ++c) {
        const float w = fp8_tiled_at(GetParam(), tiles.data(), rows, cols, r, c);
        if (r < rows && c < cols)
          expect_weight(GetParam(), w, fp4_at(m.view, r, c));
        else
          ASSERT_EQ(w, 0.0f) << r << ", " << c;
      }
  }
}

TEST_P(Fp8TileLayout, GateAndUpOfOneRowMeetInOneThread) {
  const int64_t n = 96, k = 192;
  const Matrix gate = random_matrix(GetParam(), n, k, 2, low(), high());
  const Matrix up = random_matrix(GetParam(), n, k, 3, low(), high());
  std::vector<uint8_t> tiles = tiles_for(GetParam(), 2 * n, k);
  ASSERT_TRUE(pack_fp8_gate_up_tiles(gate.view, up.view, tiles.data()).ok());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < k; ++c) {
      const int64_t row = i / 32 * 64 + i % 32 / 8 * 16 + i % 8;
      expect_weight(GetParam(), fp8_tiled_at(GetParam(), tiles.data(), 2 * n, k, row, c),
                    fp4_at(gate.view, i, c));
      expect_weight(GetParam(), fp8_tiled_at(GetParam(), tiles.data(), 2 * n, k, row + 8, c),
                    fp4_at(up.view, i, c));
    }
  EXPECT_EQ(pack_fp8_gate_up_tiles(gate.view, row_slice(up.view, 0, 64), tiles.data()).code(),
            StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8TileLayout, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                         [](const auto& p) { return std::string(fp4_format_name(p.param)); });

TEST(Fp8TileLayoutMxfp4, EveryOperandIsExact) {
  for (int j = kFp8MxBottom; j <= kFp8MxTop; ++j)
    for (int magnitude = 0; magnitude < 8; ++magnitude)
      EXPECT_EQ(e4m3_decode(fp8_operand(Fp4Format::kMxfp4, j - kFp8MxBottom, magnitude)),
                std::ldexp(e2m1_decode(static_cast<uint8_t>(magnitude)), j));
}

TEST(Fp8TileLayoutMxfp4, ScalesTooFarApartAreRefused) {
  Matrix m = random_matrix(Fp4Format::kMxfp4, 64, 128, 4, 100, 100);
  m.codes.assign(m.codes.size(), 0x11);
  m.scales[8] = 90, m.scales[9] = 105;
  std::vector<uint8_t> tiles = tiles_for(Fp4Format::kMxfp4, 64, 128);
  const Status status = pack_fp8_tiles(m.view, tiles.data());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("row 2: e8m0 scales of one row span 15 octaves"), std::string::npos)
      << status.message();
  m.scales[8] = 91;
  EXPECT_TRUE(pack_fp8_tiles(m.view, tiles.data()).ok());
}

TEST(Fp8TileLayoutMxfp4, ScalesOfZeroGroupsDoNotCount) {
  Matrix m = random_matrix(Fp4Format::kMxfp4, 64, 128, 5, 100, 100);
  m.codes.assign(m.codes.size(), 0x11);
  for (size_t i = 0; i < 16; ++i) m.codes[i] = 0x80;
  m.scales[0] = 1;
  m.scales[1] = 110;
  std::vector<uint8_t> tiles = tiles_for(Fp4Format::kMxfp4, 64, 128);
  ASSERT_TRUE(pack_fp8_tiles(m.view, tiles.data()).ok());
  EXPECT_EQ(fp8_tiled_at(Fp4Format::kMxfp4, tiles.data(), 64, 128, 0, 0), 0.0f);
  EXPECT_EQ(fp8_tiled_at(Fp4Format::kMxfp4, tiles.data(), 64, 128, 0, 32), 0x1p-18f);
  EXPECT_EQ(fp8_tiled_at(Fp4Format::kMxfp4, tiles.data(), 64, 128, 0, 64), 0x1p-28f);
}

// Each row has a separate factor: one row is zero, and the scales of the other rows range from tiny to huge.
TEST(Fp8TileLayoutMxfp4, RowsHaveTheirOwnRange) {
  Matrix m = random_matrix(Fp4Format::kMxfp4, 64, 128, 6, 0, 0);
  for (size_t r = 0; r < 64; ++r)
    for (size_t i = 0; i < 4; ++i) m.scales[r * 4 + i] = static_cast<uint8_t>(3 * r + i + (r == 63 ? 40 : 0));
  std::fill_n(m.codes.begin(), 64, 0x08);
  std::vector<uint8_t> tiles = tiles_for(Fp4Format::kMxfp4, 64, 128);
  ASSERT_TRUE(pack_fp8_tiles(m.view, tiles.data()).ok());
  for (int64_t r = 0; r < 64; ++r)
    for (int64_t c = 0; c < 128; ++c)
      ASSERT_EQ(fp8_tiled_at(Fp4Format::kMxfp4, tiles.data(), 64, 128, r, c), fp4_at(m.view, r, c)) << r;
}

// Checks the error stated in the header with quantised, normally distributed weights.
TEST(Fp8TileLayoutNvfp4, FoldErrorIsWhatTheHeaderSays) {
  const int64_t rows = 128, cols = 1024;
  Random random(7);
  const std::vector<float> weights = random.normal(rows * cols, 0.02f);
  const float amax = *std::max_element(weights.begin(), weights.end(),
                                       [](float a, float b) { return std::abs(a) < std::abs(b); });
  const EncodeScale gs = nvfp4_encode_scale(std::abs(amax));
  Matrix m;
  m.codes.resize(static_cast<size_t>(rows * cols / 2)),
      m.scales.resize(static_cast<size_t>(rows * cols / 16));
  nvfp4_quantize_row(weights.data(), rows * cols, gs, m.codes.data(), m.scales.data());
  m.view = {Fp4Format::kNvfp4, rows, cols, m.codes.data(), m.scales.data(), cols / 2, cols / 16, 1.0f};
  std::vector<uint8_t> tiles = tiles_for(Fp4Format::kNvfp4, rows, cols);
  ASSERT_TRUE(pack_fp8_tiles(m.view, tiles.data()).ok());
  double error = 0, norm = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const double w = fp4_at(m.view, r, c);
      error += std::pow(fp8_tiled_at(Fp4Format::kNvfp4, tiles.data(), rows, cols, r, c) - w, 2);
      norm += w * w;
    }
  const double relative = std::sqrt(error / norm);
  EXPECT_GT(relative, 0.019);
  EXPECT_LT(relative, 0.025);
  RecordProperty("relative_l2", std::to_string(relative));
}

// The rows of each expert start at a multiple of 8, do not overlap those of other experts, and fit in the
// slabs.
TEST(Fp8Slabs, ExpertsDoNotOverlap) {
  Random random(8);
  for (int round = 0; round < 200; ++round) {
    const int64_t experts = random.integer(1, 20);
    int64_t offset = 0, end = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = random.integer(0, 2) == 0 ? 0 : random.integer(0, 40);
      const int64_t first = slab_first_row(e, offset, 0);
      EXPECT_EQ(first % 8, 0);
      EXPECT_GE(first, end);
      end = first + slab_round_up(count);
      offset += count;
    }
    EXPECT_LE(end, num_slab_rows(offset, 0, experts));
  }
  EXPECT_EQ(slab_first_row(3, 999, 13), 48);
  EXPECT_EQ(num_slab_rows(4 * 13, 13, 4), 64);
}

TEST(Fp8Slabs, EveryElementHasItsPlace) {
  std::set<int64_t> places;
  for (int64_t r = 0; r < 24; ++r)
    for (int64_t k = 0; k < 256; ++k) places.insert(fp8_slab_offset(24, r, k));
  EXPECT_EQ(places.size(), 24u * 256u);
  EXPECT_EQ(*places.rbegin(), slabs_bytes(24, 256) - 1);
  EXPECT_EQ(fp8_slab_offset(24, 3, 128 + 17), 24 * 128 + 3 * 128 + (4 ^ 3) * 16 + 1);
  EXPECT_EQ(fp8_slab_offset(24, 3, 128 + 64 + 17), 24 * 128 + 3 * 128 + (4 ^ 3) * 16 + 8 + 1);
}

}  // namespace
}  // namespace fp4moe
