#include "formats/fp4_matrix.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "formats/nearest_value.h"

namespace fp4moe {
namespace {

// Returns the value of a scale byte by the format's definition.
double scale_oracle(Fp4Format format, int byte) {
  if (format == Fp4Format::kMxfp4)
    return byte == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, byte - 127);
  if (byte % 128 == 127) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = oracle::e4m3_magnitudes()[byte % 128];
  return byte < 128 ? magnitude : -magnitude;
}

double code_oracle(int code) {
  const double magnitude = oracle::e2m1_magnitudes()[code % 8];
  return code < 8 ? magnitude : -magnitude;
}

// Returns whether a and b are bitwise equal or both NaN.
bool same_float(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

class EveryFormat : public testing::TestWithParam<Fp4Format> {};
INSTANTIATE_TEST_SUITE_P(Fp4Matrix, EveryFormat, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                         [](const auto& test) { return fp4_format_name(test.param); });

// Row `code` contains that code once, in the low or high nibble of code byte code % (block / 2), and zeros
// elsewhere.
TEST_P(EveryFormat, AllCodesTimesAllScalesInBothNibbles) {
  const int block = fp4_block(GetParam());
  for (bool odd : {false, true})
    for (float tensor_scale : {1.0f, 0.3f}) {
      if (GetParam() == Fp4Format::kMxfp4 && tensor_scale != 1) continue;
      std::vector<uint8_t> codes(16 * block / 2), scales(16);
      Fp4MatrixView view{GetParam(), 16, block, codes.data(), scales.data(), block / 2, 1, tensor_scale};
      for (int byte = 0; byte < 256; ++byte) {
        for (int code = 0; code < 16; ++code) {
          codes[code * block / 2 + code % (block / 2)] = static_cast<uint8_t>(odd ? code << 4 : code);
          scales[code] = static_cast<uint8_t>(byte);
        }
        for (int code = 0; code < 16; ++code) {
          const int64_t column = 2 * (code % (block / 2)) + (odd ? 1 : 0);
          const auto block_value = static_cast<float>(code_oracle(code) * scale_oracle(GetParam(), byte));
          ASSERT_TRUE(same_float(fp4_at(view, code, column), block_value * tensor_scale))
              << code << " x " << byte;
          std::vector<float> row(block);
          fp4_dequantize_row(view, code, row.data());
          for (int c = 0; c < block; ++c) ASSERT_TRUE(same_float(row[c], fp4_at(view, code, c)));
        }
      }
    }
}

TEST_P(EveryFormat, StridesPickEverySecondRow) {
  const int block = fp4_block(GetParam());
  const int64_t cols = 3 * block, rows = 5;
  std::vector<uint8_t> codes(2 * rows * cols / 2), scales(2 * rows * cols / block);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(37 * i + 11);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(40 + i);
  const Fp4MatrixView all{GetParam(), 2 * rows, cols, codes.data(), scales.data(), cols / 2, cols / block, 1};
  for (int64_t first : {0, 1}) {
    Fp4MatrixView half = all;
    half.rows = rows;
    half.codes += first * cols / 2, half.scales += first * cols / block;
    half.code_stride_bytes *= 2, half.scale_stride_bytes *= 2;
    std::vector<float> row(cols);
    for (int64_t r = 0; r < rows; ++r) {
      fp4_dequantize_row(half, r, row.data());
      for (int64_t c = 0; c < cols; ++c) ASSERT_EQ(row[c], fp4_at(all, 2 * r + first, c)) << r << ", " << c;
    }
  }
}

TEST(Fp4Matrix, RowWithoutColumnsWritesNothing) {
  float untouched = 3;
  fp4_dequantize_row({Fp4Format::kMxfp4, 1, 0, nullptr, nullptr, 0, 0, 1}, 0, &untouched);
  EXPECT_EQ(untouched, 3);
}

}  // namespace
}  // namespace fp4moe
