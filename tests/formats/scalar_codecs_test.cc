#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "formats/bf16.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/nearest_value.h"

namespace fp4moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float from_bits(uint32_t u) { return std::bit_cast<float>(u); }

// Returns every value of `magnitudes`, every rounding boundary between two of them, both float neighbours of
// each, and the ends of the float range, with both signs.
std::vector<float> decision_points(const std::vector<double>& magnitudes) {
  std::vector<float> points = {0, 0x1p-149f, 0x1p-126f, std::numeric_limits<float>::max(), kInf};
  const auto add = [&](double x) {
    const float f = static_cast<float>(x);
    EXPECT_EQ(f, x) << "a decision point must be a float";
    for (float p : {f, std::nextafter(f, 0.0f), std::nextafter(f, kInf)}) points.push_back(p);
  };
  for (size_t i = 0; i < magnitudes.size(); ++i) {
    add(magnitudes[i]);
    if (i > 0) add((magnitudes[i - 1] + magnitudes[i]) / 2);
  }
  const double last = magnitudes.back(), step = last - magnitudes[magnitudes.size() - 2];
  for (double x : {last + step / 2, last + step, 2 * last}) add(x);
  for (size_t i = 0, n = points.size(); i < n; ++i) points.push_back(-points[i]);
  return points;
}

// Calls f for every finite bf16, as a float.
template <class F>
void for_all_bf16(F f) {
  for (uint32_t u = 0; u < 0x10000; ++u)
    if (const float x = from_bits(u << 16); std::isfinite(x)) f(x);
}

TEST(E2m1, DecodesTheSixteenCodes) {
  const std::vector<double> magnitudes = oracle::e2m1_magnitudes();
  for (int code = 0; code < 16; ++code) {
    const float expected = static_cast<float>(code < 8 ? magnitudes[code] : -magnitudes[code - 8]);
    EXPECT_EQ(bits(e2m1_decode(static_cast<uint8_t>(code))), bits(expected)) << code;
    EXPECT_EQ(bits(kE2m1Values[code]), bits(expected)) << code;
    EXPECT_EQ(e2m1_encode(expected), code);
  }
}

TEST(E2m1, EncodesEveryDecisionPointAndItsNeighbours) {
  for (float x : decision_points(oracle::e2m1_magnitudes())) EXPECT_EQ(e2m1_encode(x), oracle::e2m1(x)) << x;
}

TEST(E2m1, EncodesEveryBf16) {
  for_all_bf16([](float x) { ASSERT_EQ(e2m1_encode(x), oracle::e2m1(x)) << x; });
}

TEST(E2m1, TiesAsThePublishedTableSays) {
  const float ties[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const uint8_t codes[] = {0, 2, 2, 4, 4, 6, 6};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(e2m1_encode(ties[i]), codes[i]) << ties[i];
    EXPECT_EQ(e2m1_encode(-ties[i]), codes[i] | 8) << -ties[i];
  }
}

TEST(E2m1, NanOfEitherSignIsPlusSixAndZeroKeepsItsSign) {
  for (uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu})
    EXPECT_EQ(e2m1_encode(from_bits(nan)), 7);
  EXPECT_EQ(e2m1_encode(-0.0f), 8);
  EXPECT_EQ(e2m1_encode(-0.1f), 8);
  EXPECT_EQ(e2m1_encode(-kInf), 15);
}

TEST(E2m1, EvenElementLiesInTheLowNibble) {
  for (int byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<uint8_t>(byte);
    EXPECT_EQ(e2m1_even(b), byte % 16);
    EXPECT_EQ(e2m1_odd(b), byte / 16);
    EXPECT_EQ(e2m1_pack(e2m1_even(b), e2m1_odd(b)), byte);
  }
}

TEST(E4m3, DecodesAndEncodesAllBytes) {
  const std::vector<double> magnitudes = oracle::e4m3_magnitudes();
  for (int code = 0; code < 256; ++code) {
    const float x = e4m3_decode(static_cast<uint8_t>(code));
    if (code % 128 == 127) {
      EXPECT_TRUE(std::isnan(x)) << code;
      EXPECT_EQ(e4m3_encode(x), 0x7f);
      continue;
    }
    EXPECT_EQ(bits(x), bits(static_cast<float>(code < 128 ? magnitudes[code] : -magnitudes[code - 128])))
        << code;
    EXPECT_EQ(e4m3_encode(x), code);
  }
  EXPECT_EQ(e4m3_decode(0x7e), kE4m3Max);
}

TEST(E4m3, EncodesEveryDecisionPointAndItsNeighbours) {
  for (float x : decision_points(oracle::e4m3_magnitudes())) EXPECT_EQ(e4m3_encode(x), oracle::e4m3(x)) << x;
}

TEST(E4m3, EncodesEveryBf16) {
  for_all_bf16([](float x) { ASSERT_EQ(e4m3_encode(x), oracle::e4m3(x)) << x; });
}

TEST(E4m3, SaturatesAndMapsNan) {
  EXPECT_EQ(e4m3_encode(kInf), 0x7e);
  EXPECT_EQ(e4m3_encode(-kInf), 0xfe);
  EXPECT_EQ(e4m3_encode(464.0f), 0x7e);
  EXPECT_EQ(e4m3_encode(kNan), 0x7f);
  EXPECT_EQ(e4m3_encode(-kNan), 0x7f);
  EXPECT_EQ(e4m3_encode(0x1p-10f), 0) << "half of the least subnormal ties to zero";
  EXPECT_EQ(e4m3_encode(std::nextafter(0x1p-10f, 1.0f)), 1);
  EXPECT_EQ(e4m3_encode(-0.0f), 0x80);
}

TEST(E8m0, DecodesAllBytes) {
  for (int byte = 0; byte < 255; ++byte)
    EXPECT_EQ(e8m0_decode(static_cast<uint8_t>(byte)), std::ldexp(1.0, byte - 127)) << byte;
  EXPECT_TRUE(std::isnan(e8m0_decode(255)));
}

// Other engines' SM90 kernels decode the byte as a float's exponent field.
TEST(E8m0, Sm90RuleDiffersAtBothEndsOnly) {
  const auto decode_sm90 = [](int byte) { return std::bit_cast<float>(static_cast<uint32_t>(byte) << 23); };
  for (int byte = 1; byte < 255; ++byte)
    EXPECT_EQ(decode_sm90(byte), e8m0_decode(static_cast<uint8_t>(byte)));
  EXPECT_EQ(bits(decode_sm90(0)), 0u);
  EXPECT_EQ(decode_sm90(255), kInf);
}

TEST(E8m0, RoundUpIsTheLeastPowerNotBelow) {
  const auto check = [](float t) {
    int least = 0;
    while (least < 254 && std::ldexp(1.0, least - 127) < t) ++least;
    ASSERT_EQ(e8m0_encode_round_up(t), least) << t;
    if (t >= 0x1p-126f && t <= 0x1p127f) {  // integer arithmetic on the bits gives the same for normal floats
      ASSERT_EQ(e8m0_encode_round_up(t), ((bits(t) + 0x007fffffu) & 0x7f800000u) >> 23) << t;
    }
  };
  for (int byte = 0; byte < 255; ++byte) {
    const float power = std::ldexp(1.0f, byte - 127);
    for (float t : {power, std::nextafter(power, 0.0f), std::nextafter(power, kInf), power * 1.5f}) check(t);
  }
  for (float t : {0.0f, 0x1p-149f, std::numeric_limits<float>::max(), kInf}) check(t);
  EXPECT_EQ(e8m0_encode_round_up(kNan), 255);
}

TEST(E8m0, OcpFloorIsTheExponentLessTwo) {
  const auto check = [](float amax) {
    const int expected = std::isinf(amax) ? 253 : std::max(0, 127 + std::ilogb(amax) - 2);
    ASSERT_EQ(e8m0_encode_ocp_floor(amax), expected) << amax;
  };
  for (int byte = 0; byte < 255; ++byte) {
    const float power = std::ldexp(1.0f, byte - 127);
    for (float a : {power, std::nextafter(power, kInf), power * 1.5f}) check(a);
    if (byte > 0) check(std::nextafter(power, 0.0f));
  }
  for (float a : {0x1p-149f, std::numeric_limits<float>::max(), kInf}) check(a);
  EXPECT_EQ(e8m0_encode_ocp_floor(0), 0);
  EXPECT_EQ(e8m0_encode_ocp_floor(kNan), 255);
}

// The value of a bf16 magnitude by definition; the code after the largest finite one counts as 2^128.
double bf16_magnitude(uint32_t code) {
  const int exponent = static_cast<int>(code >> 7), fraction = static_cast<int>(code & 0x7f);
  return exponent == 0 ? std::ldexp(fraction, -126 - 7) : std::ldexp(128 + fraction, exponent - 127 - 7);
}

TEST(Bf16, DecodesAndEncodesAllCodes) {
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const bf16 code{static_cast<uint16_t>(u)};
    const float x = bf16_to_float(code);
    const uint32_t magnitude = u & 0x7fff;
    if (magnitude > 0x7f80) {
      ASSERT_TRUE(std::isnan(x)) << u;
      ASSERT_EQ(float_to_bf16(x).bits, u | 0x40) << "a NaN is made quiet";
      continue;
    }
    ASSERT_EQ(std::signbit(x), u >= 0x8000) << u;
    if (magnitude < 0x7f80) {
      ASSERT_EQ(std::abs(static_cast<double>(x)), bf16_magnitude(magnitude)) << u;
    } else {
      ASSERT_TRUE(std::isinf(x)) << u;
    }
    ASSERT_EQ(float_to_bf16(x), code) << u;
  }
}

TEST(Bf16, RoundsEveryMidpointToEvenAndItsNeighboursToTheNearest) {
  for (uint32_t u = 0; u < 0x7f80; ++u) {
    const auto middle = static_cast<float>((bf16_magnitude(u) + bf16_magnitude(u + 1)) / 2);
    for (float sign : {1.0f, -1.0f}) {
      const uint32_t s = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(float_to_bf16(sign * middle).bits, s | (u + (u & 1))) << u;
      ASSERT_EQ(float_to_bf16(sign * std::nextafter(middle, 0.0f)).bits, s | u) << u;
      ASSERT_EQ(float_to_bf16(sign * std::nextafter(middle, kInf)).bits, s | (u + 1)) << u;
    }
  }
}

TEST(Bf16, NanWithAnEmptyUpperFractionStaysNan) {
  EXPECT_EQ(float_to_bf16(from_bits(0x7f800001u)).bits, 0x7fc0);
  EXPECT_EQ(float_to_bf16(from_bits(0xff800001u)).bits, 0xffc0);
}

RC_GTEST_PROP(ScalarCodecs, AgreeWithTheSearchOnAnyFloat, (uint32_t u)) {
  const float x = from_bits(u);
  RC_PRE(!std::isnan(x));
  RC_ASSERT(e2m1_encode(x) == oracle::e2m1(x));
  RC_ASSERT(e4m3_encode(x) == oracle::e4m3(x));
  const double rounded = round_to_bf16(x);
  if (std::isfinite(rounded)) RC_ASSERT(std::abs(rounded - x) <= std::max(std::abs(x) * 0x1p-8, 0x1p-134));
}

}  // namespace
}  // namespace fp4moe
