#include "formats/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "formats/e4m3.h"
#include "formats/nearest_value.h"

namespace fp4moe {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

template <class T>
Quantized quantize(const std::vector<T>& x) {
  const int64_t cols = static_cast<int64_t>(x.size());
  Quantized q{std::vector<uint8_t>(x.size(), 0xAA),
              std::vector<float>(static_cast<size_t>(fp8_num_groups(cols)), -1)};
  fp8_quantize_row(x.data(), cols, q.codes.data(), q.scales.data());
  return q;
}

std::vector<float> dequantize(const Quantized& q) {
  std::vector<float> x(q.codes.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = e4m3_decode(q.codes[i]) * q.scales[i / kFp8Group];
  return x;
}

double value_of(uint8_t code) {
  const double magnitude = oracle::e4m3_magnitudes()[code & 0x7f];
  return code & 0x80 ? -magnitude : magnitude;
}

std::vector<float> random_row(size_t cols, int seed, float spread) {
  std::mt19937 generator(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> x(cols);
  for (float& value : x) value = normal(generator) * std::exp2(spread * normal(generator));
  return x;
}

TEST(Fp8Row, FollowsItsRuleForRowsOfAnyLength) {
  for (const size_t cols : {1u, 127u, 128u, 129u, 300u, 512u}) {
    const std::vector<float> x = random_row(cols, static_cast<int>(cols), 4);
    const Quantized q = quantize(x);
    ASSERT_EQ(q.scales.size(), (cols + 127) / 128);
    for (size_t group = 0; group < q.scales.size(); ++group) {
      const size_t begin = group * 128, end = std::min(begin + 128, cols);
      float amax = 0;
      for (size_t i = begin; i < end; ++i) amax = std::max(amax, std::abs(x[i]));
      volatile float scale = amax / 448.0f;
      EXPECT_EQ(q.scales[group], scale);
      for (size_t i = begin; i < end; ++i) {
        volatile float scaled = x[i] / scale;
        ASSERT_EQ(q.codes[i], oracle::e4m3(scaled)) << i;
      }
    }
    const std::vector<float> back = dequantize(q);
    for (size_t i = 0; i < cols; ++i) {
      EXPECT_EQ(back[i], static_cast<float>(value_of(q.codes[i]) * q.scales[i / 128]));
      // Half an ulp with three fraction bits, or half the smallest subnormal.
      EXPECT_LE(std::abs(back[i] - x[i]),
                std::max(std::abs(x[i]) / 16.0, 0x1p-10 * q.scales[i / 128]) * 1.0001);
    }
  }
}

TEST(Fp8Row, EveryCodeOfAFullRangeGroupSurvives) {
  for (const float scale : {1.0f, 0x1p-20f, 0x1p30f}) {
    std::vector<float> x;
    for (int code = 0; code < 256; ++code)
      if ((code & 0x7f) != 0x7f)
        x.push_back(static_cast<float>(value_of(static_cast<uint8_t>(code))) * scale);
    ASSERT_EQ(x.size(), 254u);  // 448 is in the first group, -448 in the second
    const Quantized q = quantize(x);
    EXPECT_EQ(q.scales, (std::vector<float>{scale, scale}));
    EXPECT_EQ(dequantize(q), x);
  }
}

TEST(Fp8Row, OfBf16IsThatOfItsFloats) {
  const std::vector<float> x = random_row(200, 1, 3);
  std::vector<bf16> narrow;
  std::vector<float> widened;
  for (const float value : x) {
    narrow.push_back(float_to_bf16(value));
    widened.push_back(bf16_to_float(narrow.back()));
  }
  const Quantized from_bf16 = quantize(narrow), from_float = quantize(widened);
  EXPECT_EQ(from_bf16.codes, from_float.codes);
  EXPECT_EQ(from_bf16.scales, from_float.scales);
}

TEST(Fp8Row, EdgeCases) {
  const Quantized zeros = quantize(std::vector<float>{0, -0.0f, 0});
  EXPECT_EQ(zeros.codes, (std::vector<uint8_t>{0, 0x80, 0}));
  EXPECT_EQ(zeros.scales, (std::vector<float>{0}));
  const Quantized underflow = quantize(std::vector<float>{0x1p-149f, -0x1p-149f});
  EXPECT_EQ(underflow.codes, (std::vector<uint8_t>{0, 0x80}));
  EXPECT_EQ(underflow.scales, (std::vector<float>{0}));
  const Quantized nan = quantize(std::vector<float>{std::nanf(""), 448, -1});
  EXPECT_EQ(nan.codes, (std::vector<uint8_t>{0x7f, 0x7e, 0xb8}));
  EXPECT_EQ(nan.scales, (std::vector<float>{1}));
  const Quantized all_nan = quantize(std::vector<float>{std::nanf("")});
  EXPECT_EQ(all_nan.codes, (std::vector<uint8_t>{0x7f}));
  const Quantized infinite = quantize(std::vector<float>{kInf, -kInf, 1});
  EXPECT_EQ(infinite.codes, (std::vector<uint8_t>{0x7e, 0xfe, 0}));
  EXPECT_EQ(infinite.scales, (std::vector<float>{kMax / 448}));
  fp8_quantize_row(static_cast<const float*>(nullptr), 0, nullptr, nullptr);  // no memory access
}

// e4m3_encode() applies no scale.
TEST(Fp8Cast, RoundsEveryBf16ToTheNearestCode) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_to_float(bf16{static_cast<uint16_t>(bits)});
    ASSERT_EQ(e4m3_encode(x), std::isnan(x) ? 0x7f : oracle::e4m3(x)) << x;
  }
}

TEST(Fp8Cast, IsInvertedExactly) {
  for (int i = 0; i < 256; ++i) {
    const auto code = static_cast<uint8_t>(i);
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(e4m3_decode(code), value_of(code));
    EXPECT_EQ(e4m3_encode(e4m3_decode(code)), code);
  }
}

}  // namespace
}  // namespace fp4moe
