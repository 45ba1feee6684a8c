// Checks the oracle's folded weights for w4a8 with FP8 tokens: every FP4 code with every scale, for every
// largest scale of a row, against the rule in docs/numerics.md and against the GPU tiles.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/expert_ops.h"

namespace fp4moe {
namespace {

constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
constexpr int kLargestE4m3 = 0x7e;

double code_value(int code) { return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7]; }

double e4m3_value(int byte) {
  return byte < 8 ? std::ldexp(byte, -9) : std::ldexp(8 + byte % 8, byte / 8 - 10);
}

// The nearest e4m3 value; ties go to the even byte.
double nearest_e4m3(double x) {
  int best = 0;
  for (int byte = 1; byte <= kLargestE4m3; ++byte) {
    const double d = std::abs(e4m3_value(byte) - std::abs(x)),
                 least = std::abs(e4m3_value(best) - std::abs(x));
    if (d < least || (d == least && byte % 2 == 0)) best = byte;
  }
  return std::copysign(e4m3_value(best), x);
}

// Rows in which every block contains all sixteen codes.
struct Matrix {
  Matrix(Fp4Format format, const std::vector<std::vector<uint8_t>>& row_scales) {
    const int block = fp4_block(format);
    const auto blocks = static_cast<int64_t>(row_scales.front().size());
    for (const std::vector<uint8_t>& row : row_scales) {
      scales.insert(scales.end(), row.begin(), row.end());
      for (int64_t i = 0; i < blocks * block; i += 2)
        codes.push_back(static_cast<uint8_t>(i % 16 | (i + 1) % 16 << 4));
    }
    const auto rows = static_cast<int64_t>(row_scales.size());
    view = {format, rows, blocks * block, codes.data(), scales.data(), blocks * block / 2, blocks, 0.75f};
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  std::vector<uint8_t> codes, scales;
  Fp4MatrixView view;
};

void expect_tiles_hold_the_folded_rows(const Fp4MatrixView& w) {
  std::vector<uint8_t> tiles(static_cast<size_t>(fp8_tiled_bytes(w.format, w.rows, w.cols)));
  ASSERT_TRUE(pack_fp8_tiles(w, tiles.data()).ok());
  std::vector<float> folded(static_cast<size_t>(w.cols));
  for (int64_t r = 0; r < w.rows; ++r) {
    fp8_folded_row(w, r, folded.data());
    for (int64_t c = 0; c < w.cols; ++c)
      ASSERT_EQ(folded[static_cast<size_t>(c)],
                fp8_tiled_at(w.format, tiles.data(), w.rows, w.cols, r, c) * w.tensor_scale)
          << r << ", " << c;
  }
}

TEST(ExpertFp8Ref, Nvfp4ProductsAreRoundedToE4m3ByTheRowsLargestScale) {
  std::vector<std::vector<uint8_t>> scales;
  for (int most = 0; most <= kLargestE4m3; ++most) {
    scales.emplace_back();
    for (int scale = 0; scale <= kLargestE4m3 + 1; ++scale)
      scales.back().push_back(static_cast<uint8_t>(std::min(scale, most)));
  }
  const Matrix m(Fp4Format::kNvfp4, scales);
  std::vector<float> folded(static_cast<size_t>(m.view.cols));
  int64_t rounded = 0;
  for (int most = 0; most <= kLargestE4m3; ++most) {
    double p = 1;  // moves the largest scale into (224, 448]
    while (most > 0 && e4m3_value(most) * p * 2 <= 448) p *= 2;
    fp8_folded_row(m.view, most, folded.data());
    for (int64_t c = 0; c < m.view.cols; ++c) {
      const double scale = e4m3_value(scales[static_cast<size_t>(most)][static_cast<size_t>(c / 16)]);
      const double exact = code_value(static_cast<int>(c % 16)) * scale;
      const double expected = nearest_e4m3(exact * p / 8) * 8 / p * 0.75;
      ASSERT_EQ(folded[static_cast<size_t>(c)], expected) << "largest " << most << ", column " << c;
      rounded += expected != exact * 0.75 ? 1 : 0;
    }
  }
  EXPECT_GT(rounded, m.view.rows * m.view.cols / 8)
      << "too few weights were rounded; the test would pass without rounding";
  expect_tiles_hold_the_folded_rows(m.view);
}

// The scale of a block of zeros does not affect the row's largest scale.
TEST(ExpertFp8Ref, ScalesOfZeroBlocksDoNotCount) {
  Matrix m(Fp4Format::kNvfp4, {{0x7e, 0x13, 0x10, 0x0f}});
  std::fill_n(m.codes.begin(), 8, 0x80);
  std::vector<float> folded(64), alone(48);
  fp8_folded_row(m.view, 0, folded.data());
  fp8_folded_row(column_slice(m.view, 16, 48), 0, alone.data());
  EXPECT_EQ(std::vector<float>(folded.begin() + 16, folded.end()), alone);
  EXPECT_EQ(folded[0], 0.0f);
  expect_tiles_hold_the_folded_rows(m.view);
}

TEST(ExpertFp8Ref, Mxfp4IsExactOver14OctavesOfARow) {
  std::vector<std::vector<uint8_t>> scales;
  for (int least = 1; least + 14 <= 252; ++least) {  // larger scales would overflow f32
    scales.emplace_back();
    for (int j = 0; j < 15; ++j) scales.back().push_back(static_cast<uint8_t>(least + j));
  }
  const Matrix m(Fp4Format::kMxfp4, scales);
  std::vector<float> folded(static_cast<size_t>(m.view.cols));
  for (int64_t r = 0; r < m.view.rows; ++r) {
    fp8_folded_row(m.view, r, folded.data());
    for (int64_t c = 0; c < m.view.cols; ++c)
      ASSERT_EQ(
          folded[static_cast<size_t>(c)],
          std::ldexp(code_value(static_cast<int>(c % 16)), static_cast<int>(r + 1 + c / 32 - 127)) * 0.75)
          << r << ", " << c;
  }
  EXPECT_TRUE(check_fp8_scales(m.view).ok());
  expect_tiles_hold_the_folded_rows(m.view);
}

TEST(ExpertFp8Ref, FifteenOctavesInARowAreRefused) {
  const Matrix m(Fp4Format::kMxfp4, {{100, 101}, {100, 115}});
  const Status status = check_fp8_scales(m.view);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("row 1: e8m0 scales of one row span 15 octaves"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace fp4moe
