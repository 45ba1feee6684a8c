#include "formats/q8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace fp4moe {
namespace {

Q8Block quantize(const std::vector<float>& values) {
  std::vector<bf16> rounded;
  for (const float v : values) rounded.push_back(float_to_bf16(v));
  return quantize_q8(rounded.data(), std::ssize(rounded));
}

// Covers every scale a block can have: the largest magnitude runs over all finite bf16.
TEST(Q8, ErrorIsAtMostHalfAScale) {
  std::mt19937 random(1);
  for (uint32_t bits = 1; bits < 0x7f80; ++bits) {
    const float largest = bf16_to_float({static_cast<uint16_t>(bits)});
    std::vector<bf16> values(kQ8Block);
    for (bf16& v : values) v = float_to_bf16(largest * (static_cast<float>(random() % 4097) / 2048 - 1));
    values[random() % kQ8Block] = float_to_bf16(bits % 2 == 0 ? largest : -largest);
    const Q8Block block = quantize_q8(values.data(), kQ8Block);
    const double scale = bf16_to_float(block.scale);
    const double limit = scale > 0 ? scale / 2 : 127.5 * std::ldexp(1.0, -126);
    int most = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_LE(std::abs(bf16_to_float(values[i]) - block.codes[i] * scale), limit) << bits << " " << i;
      most = std::max(most, std::abs(block.codes[i]));
    }
    ASSERT_EQ(most, scale > 0 ? 127 : 0) << bits;
    ASSERT_EQ(scale == 0, largest / 127 < std::numeric_limits<float>::min() * (1 - 0x1p-9f)) << bits;
  }
}

TEST(Q8, TheExampleOfTheHeader) {
  std::vector<float> values(kQ8Block, 0.5f);
  values[7] = -1;
  const Q8Block block = quantize(values);
  EXPECT_EQ(block.scale.bits, 0x3c01);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(block.codes[i], i == 7 ? -127 : 64);
}

TEST(Q8, TiesGoToEven) {
  const Q8Block block = quantize({127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 63.5f});
  const int8_t expected[] = {127, 0, 2, 2, 0, -2, 64};
  for (size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(block.codes[i], expected[i]) << i;
}

TEST(Q8, AShortBlockEndsInZeros) {
  const Q8Block block = quantize({-3});
  EXPECT_EQ(block.codes[0], -127);
  for (int64_t i = 1; i < kQ8Block; ++i) EXPECT_EQ(block.codes[i], 0);
}

TEST(Q8, ABlockThatIsNotFiniteIsNan) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()})
    EXPECT_TRUE(std::isnan(bf16_to_float(quantize({1, bad, 2}).scale)));
}

TEST(Q8, ZerosAreZeros) {
  const Q8Block block = quantize(std::vector<float>(kQ8Block, -0.0f));
  EXPECT_EQ(block.scale.bits, 0);
  for (const int8_t code : block.codes) EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace fp4moe
