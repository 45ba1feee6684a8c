#include "formats/mxfp4.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "formats/nearest_value.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Quantized {
  std::vector<uint8_t> codes, scales;
};

template <class T>
Quantized quantize(const std::vector<T>& x, Mxfp4ScaleRule rule) {
  Quantized q{std::vector<uint8_t>(x.size() / 2), std::vector<uint8_t>(x.size() / 32)};
  mxfp4_quantize_row(x.data(), static_cast<int64_t>(x.size()), rule, q.codes.data(), q.scales.data());
  return q;
}

std::vector<float> dequantize(const Quantized& q) {
  std::vector<float> x(q.codes.size() * 2);
  mxfp4_dequantize_row(q.codes.data(), q.scales.data(), static_cast<int64_t>(x.size()), x.data());
  return x;
}

std::vector<float> block_with(float x0) {
  std::vector<float> x(32, 0);
  x[0] = x0;
  return x;
}

std::vector<float> random_row(size_t num_blocks, int spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(32 * num_blocks);
  for (size_t block = 0; block < num_blocks; ++block) {
    const int exponent = static_cast<int>(random() % (2 * spread + 1)) - spread;
    for (size_t i = 0; i < 32; ++i)
      x[32 * block + i] = static_cast<float>(std::ldexp(static_cast<int32_t>(random()), exponent - 31));
  }
  return x;
}

class EveryRule : public testing::TestWithParam<Mxfp4ScaleRule> {};
INSTANTIATE_TEST_SUITE_P(Mxfp4, EveryRule,
                         testing::Values(Mxfp4ScaleRule::kRoundUp, Mxfp4ScaleRule::kOcpFloor),
                         [](const auto& test) {
                           return test.param == Mxfp4ScaleRule::kRoundUp ? "round_up" : "ocp_floor";
                         });

TEST(Mxfp4, SevenRoundsUpInOneRuleAndSaturatesInTheOther) {
  const Quantized up = quantize(block_with(7), Mxfp4ScaleRule::kRoundUp);
  EXPECT_EQ(up.scales[0], 128);
  EXPECT_EQ(up.codes[0], 0x06) << "3.5 ties to 4";
  EXPECT_EQ(dequantize(up)[0], 8);
  const Quantized floor = quantize(block_with(7), Mxfp4ScaleRule::kOcpFloor);
  EXPECT_EQ(floor.scales[0], 127);
  EXPECT_EQ(floor.codes[0], 0x07);
  EXPECT_EQ(dequantize(floor)[0], 6);
}

TEST(Mxfp4, SixTimesAPowerOfTwoIsExactInBothRules) {
  for (int n = -124; n <= 125; ++n)
    for (auto rule : {Mxfp4ScaleRule::kRoundUp, Mxfp4ScaleRule::kOcpFloor}) {
      const float x = std::ldexp(6.0f, n);
      const Quantized q = quantize(block_with(-x), rule);
      EXPECT_EQ(q.scales[0], 127 + n);
      EXPECT_EQ(q.codes[0], 0x0F);
      EXPECT_EQ(dequantize(q)[0], -x);
    }
}

// Tests every bf16 as the largest element of its block. The expected scale comes from exact arithmetic, the
// code from a search.
TEST_P(EveryRule, EveryBf16AsTheBlocksLargest) {
  for (uint32_t u = 1; u < 0x7f80; ++u) {
    const bf16 code{static_cast<uint16_t>(u)};
    const double amax = bf16_to_float(code);
    int byte = 0;
    if (GetParam() == Mxfp4ScaleRule::kRoundUp) {
      while (byte < 254 && std::ldexp(6.0, byte - 127) < amax) ++byte;
    } else {
      byte = std::max(0, std::ilogb(amax) + 125);
    }
    const bool flushed = byte == 0 && GetParam() == Mxfp4ScaleRule::kRoundUp;
    std::vector<bf16> x(32, bf16{0});
    x[1] = code;
    const Quantized q = quantize(x, GetParam());
    ASSERT_EQ(q.scales[0], byte) << amax;
    ASSERT_EQ(q.codes[0], oracle::e2m1(flushed ? amax : std::ldexp(amax, 127 - byte)) << 4) << amax;
  }
}

TEST_P(EveryRule, BlockOfZeros) {
  const Quantized q = quantize(block_with(-0.0f), GetParam());
  EXPECT_EQ(q.scales[0], 0);
  EXPECT_EQ(q.codes[0], 0x08) << "the sign of a zero is kept";
  EXPECT_EQ(q.codes[1], 0);
  for (float value : dequantize(q)) EXPECT_EQ(value, 0);
}

TEST_P(EveryRule, NanCountsForNoScaleAndInfinitySaturates) {
  std::vector<float> x = block_with(6);
  x[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(quantize(x, GetParam()).scales[0], 127);
  EXPECT_EQ(quantize(x, GetParam()).codes[0], 0x77);
  const Quantized inf = quantize(block_with(kInf), GetParam());
  EXPECT_EQ(inf.scales[0], GetParam() == Mxfp4ScaleRule::kRoundUp ? 254 : 253);
  EXPECT_EQ(inf.codes[0], 0x07);
}

TEST_P(EveryRule, LargestFloatStaysFinite) {
  const Quantized q = quantize(block_with(kMax), GetParam());
  EXPECT_EQ(q.scales[0], GetParam() == Mxfp4ScaleRule::kRoundUp ? 253 : 252);
  const float y = dequantize(q)[0];
  if (GetParam() == Mxfp4ScaleRule::kOcpFloor) {
    EXPECT_EQ(y, 6 * 0x1p125f);
  } else {
    EXPECT_EQ(y, kInf) << "4 * 2^126: the rule rounds the largest floats up past the range of f32";
  }
}

TEST_P(EveryRule, Bf16InputEqualsTheSameValuesAsF32) {
  std::vector<float> x = random_row(8, 20, 5);
  std::vector<bf16> rounded(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    rounded[i] = float_to_bf16(x[i]);
    x[i] = bf16_to_float(rounded[i]);
  }
  EXPECT_TRUE(same_bytes(quantize(rounded, GetParam()).codes, quantize(x, GetParam()).codes));
  EXPECT_TRUE(same_bytes(quantize(rounded, GetParam()).scales, quantize(x, GetParam()).scales));
}

// Within the range, an element's error is at most half the largest step, that is, one unit. The OCP rule can
// clip values between 6 and 8 units.
RC_GTEST_PROP(Mxfp4Property, ErrorIsAtMostOneUnitOrWhatIsCutOff, (uint32_t seed)) {
  const std::vector<float> x = random_row(4, 60, seed);
  for (auto rule : {Mxfp4ScaleRule::kRoundUp, Mxfp4ScaleRule::kOcpFloor}) {
    const Quantized q = quantize(x, rule);
    const std::vector<float> y = dequantize(q);
    for (size_t i = 0; i < x.size(); ++i) {
      const double unit = std::ldexp(1.0, q.scales[i / 32] - 127), a = std::abs(x[i]);
      const double rounding = 0x1p-20 * unit;  // A * f32(1/6) can round down to a power of two
      const double limit = rule == Mxfp4ScaleRule::kRoundUp ? unit + rounding : std::max(unit, a - 6 * unit);
      RC_ASSERT(std::abs(static_cast<double>(y[i]) - x[i]) <= limit);
      RC_ASSERT(a <= (rule == Mxfp4ScaleRule::kRoundUp ? 6 * unit + 6 * rounding : 8 * unit));
    }
  }
}

// Quantising again keeps the values under both rules. It keeps the bytes only under the OCP rule; the other
// rule can halve the scale and double the codes.
RC_GTEST_PROP(Mxfp4Property, QuantisingTheResultAgainKeepsTheValues, (uint32_t seed)) {
  const std::vector<float> x = random_row(4, 60, seed);
  for (auto rule : {Mxfp4ScaleRule::kRoundUp, Mxfp4ScaleRule::kOcpFloor}) {
    const Quantized q = quantize(x, rule), again = quantize(dequantize(q), rule);
    RC_ASSERT(dequantize(again) == dequantize(q));
    if (rule == Mxfp4ScaleRule::kOcpFloor) RC_ASSERT(again.scales == q.scales && again.codes == q.codes);
  }
}

}  // namespace
}  // namespace fp4moe
