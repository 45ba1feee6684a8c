#include "formats/nvfp4.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
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
Quantized quantize(const std::vector<T>& x, EncodeScale gs) {
  Quantized q{std::vector<uint8_t>(x.size() / 2), std::vector<uint8_t>(x.size() / 16)};
  nvfp4_quantize_row(x.data(), static_cast<int64_t>(x.size()), gs, q.codes.data(), q.scales.data());
  return q;
}

std::vector<float> dequantize(const Quantized& q, DecodeScale scale) {
  std::vector<float> x(q.codes.size() * 2);
  nvfp4_dequantize_row(q.codes.data(), q.scales.data(), static_cast<int64_t>(x.size()), scale, x.data());
  return x;
}

float scale_value(uint8_t byte) { return static_cast<float>(oracle::e4m3_magnitudes()[byte]); }

// Performs the published steps one at a time, for finite input. The oracle's search replaces both encoders.
Quantized quantize_by_steps(const std::vector<float>& x, float gs) {
  Quantized q;
  for (size_t block = 0; block < x.size(); block += 16) {
    float amax = 0;
    for (size_t i = block; i < block + 16; ++i) amax = std::max(amax, std::abs(x[i]));
    volatile float sixth = 1.0f / 6.0f;  // volatile: rounds every step to f32 with any compiler
    volatile float multiplier = gs * sixth;
    volatile float s = amax * multiplier;
    const auto byte = static_cast<uint8_t>(amax == 0 ? 0 : oracle::e4m3(s));
    volatile float inverse_gs = 1.0f / gs;
    volatile float divisor = scale_value(byte) * inverse_gs;
    volatile float o = amax == 0 ? 0.0f : std::min(1.0f / divisor, kMax);
    q.scales.push_back(byte);
    for (size_t i = block; i < block + 16; i += 2) {
      volatile float even = x[i] * o, odd = x[i + 1] * o;
      q.codes.push_back(static_cast<uint8_t>(oracle::e2m1(even) | oracle::e2m1(odd) << 4));
    }
  }
  return q;
}

// Returns a row of blocks whose exponents vary by up to `spread` in either direction.
std::vector<float> random_row(size_t num_blocks, int spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(16 * num_blocks);
  for (size_t block = 0; block < num_blocks; ++block) {
    const int exponent = static_cast<int>(random() % (2 * spread + 1)) - spread;
    for (size_t i = 0; i < 16; ++i)
      x[16 * block + i] = static_cast<float>(std::ldexp(static_cast<int32_t>(random()), exponent - 31));
  }
  return x;
}

float amax_of(const std::vector<float>& x) {
  float amax = 0;
  for (float v : x) amax = std::max(amax, std::abs(v));
  return amax;
}

TEST(Nvfp4, WorkedBlockOfATensorWithAmax12) {
  const EncodeScale gs = nvfp4_encode_scale(12);
  EXPECT_EQ(gs.value, 224);
  std::vector<float> x(16, 0);
  x[0] = 3, x[1] = 1, x[2] = .3f, x[3] = .375f;
  const Quantized q = quantize(x, gs);
  EXPECT_EQ(q.scales[0], 0x6E);
  EXPECT_EQ(q.codes[0], 0x47);
  EXPECT_EQ(q.codes[1], 0x21);
  EXPECT_NEAR(dequantize(q, to_decode(gs))[0], 3, 3 * 0x1p-23) << "1 / 224 and the product are rounded";
}

TEST(Nvfp4, WorkedBlockWithUnitScale) {
  std::vector<float> x(16, 0);
  x[5] = .9f;
  const Quantized q = quantize(x, EncodeScale{1});
  EXPECT_EQ(q.scales[0], 0x22);
  EXPECT_EQ(q.codes[2], 0x70);
  EXPECT_EQ(dequantize(q, DecodeScale{1})[5], .9375f);
}

TEST(Nvfp4, EncodeScaleAndItsEdges) {
  EXPECT_EQ(nvfp4_encode_scale(2688).value, 1);
  EXPECT_EQ(nvfp4_encode_scale(0).value, kMax);
  EXPECT_EQ(nvfp4_encode_scale(0x1p-149f).value, kMax);
  EXPECT_EQ(nvfp4_encode_scale(kInf).value, 1);
  EXPECT_EQ(nvfp4_encode_scale(kMax).value, 2688 / kMax);
  EXPECT_EQ(to_decode(EncodeScale{224}).value, 1.0f / 224);
  EXPECT_EQ(to_encode(DecodeScale{0.25f}).value, 4);
}

TEST(Nvfp4, EqualsThePublishedStepsBitForBit) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const std::vector<float> x = random_row(8, static_cast<int>(seed % 40), seed);
    for (float gs : {nvfp4_encode_scale(amax_of(x)).value, 1.0f, 0.37f, 1e5f, kMax, 1e-30f}) {
      const Quantized expected = quantize_by_steps(x, gs), actual = quantize(x, EncodeScale{gs});
      ASSERT_TRUE(same_bytes(actual.scales, expected.scales)) << "seed " << seed << ", gs " << gs;
      ASSERT_TRUE(same_bytes(actual.codes, expected.codes)) << "seed " << seed << ", gs " << gs;
    }
  }
}

// Inputs for which one ulp in any step changes a scale byte or a code: only these reveal the order of
// operations.
TEST(Nvfp4, EqualsThePublishedStepsAroundEveryDecisionPoint) {
  const double ties[] = {.25, .75, 1.25, 1.75, 2.5, 3.5, 5};
  const std::vector<double> sf = oracle::e4m3_magnitudes();
  const auto shifted = [](double value, int ulps) {  // the nearest float, moved by `ulps`
    return std::bit_cast<float>(std::bit_cast<int32_t>(static_cast<float>(value)) + ulps);
  };
  for (float gs : {2688 / 12.7f, 0.37f, 1.9f, 77777.7f, 3e-7f})
    for (size_t byte = 8; byte + 1 < sf.size(); ++byte)
      for (int ulps = -6; ulps <= 6; ++ulps) {
        std::vector<float> x(16);
        x[0] = shifted((sf[byte] + sf[byte + 1]) / 2 * 6 / gs, ulps);
        const double chosen = sf[quantize_by_steps(x, gs).scales[0]];
        for (int i = 0; i < 7; ++i) {
          x[1 + i] = shifted(ties[i] * chosen / gs, ulps);
          x[8 + i] = -shifted(ties[i] * chosen / gs, ulps / 3);
        }
        const Quantized expected = quantize_by_steps(x, gs), actual = quantize(x, EncodeScale{gs});
        ASSERT_EQ(actual.scales[0], expected.scales[0]) << "gs " << gs << ", A " << x[0];
        ASSERT_TRUE(same_bytes(actual.codes, expected.codes)) << "gs " << gs << ", A " << x[0];
      }
}

TEST(Nvfp4, BlockOfZerosHasScaleZeroAndCodesZero) {
  std::vector<float> x(32, 0);
  x[0] = -0.0f, x[20] = 1;
  const Quantized q = quantize(x, EncodeScale{100});
  EXPECT_EQ(q.scales[0], 0);
  EXPECT_EQ(q.codes[0], 0x08) << "the sign of a zero is kept";
  for (size_t i = 1; i < 8; ++i) EXPECT_EQ(q.codes[i], 0) << i;
  EXPECT_NE(q.scales[1], 0);
}

TEST(Nvfp4, UnderflownScaleKeepsZerosAndSaturatesTheRest) {
  std::vector<float> x(16, 0);
  x[0] = 6 * 0x1p-10f, x[1] = -0x1p-40f;
  const Quantized q = quantize(x, EncodeScale{1});
  EXPECT_EQ(q.scales[0], 0);
  EXPECT_EQ(q.codes[0], 0xF7);
  EXPECT_EQ(q.codes[1], 0);
  for (float value : dequantize(q, DecodeScale{1})) EXPECT_EQ(value, 0);
  x[0] = std::nextafter(6 * 0x1p-10f, 1.0f) * (1 + 0x1p-20f);
  EXPECT_EQ(quantize(x, EncodeScale{1}).scales[0], 1) << "just above, the least subnormal";
}

TEST(Nvfp4, NanCountsForNoScaleAndInfinitySaturates) {
  std::vector<float> x(16, 1);
  x[3] = -std::numeric_limits<float>::quiet_NaN();
  const Quantized nan = quantize(x, EncodeScale{6});
  EXPECT_EQ(nan.scales[0], 0x38) << "1.0";
  EXPECT_EQ(nan.codes[1], 0x77);
  x[3] = -kInf;
  const Quantized inf = quantize(x, EncodeScale{6});
  EXPECT_EQ(inf.scales[0], 0x7e);
  EXPECT_EQ(inf.codes[1], 0xF0);
}

TEST(Nvfp4, AllMaximaOfBf16AreFinite) {
  const std::vector<bf16> x(16, bf16{0x7f7f});
  const EncodeScale gs = nvfp4_encode_scale(bf16_to_float(x[0]));
  const Quantized q = quantize(x, gs);
  EXPECT_EQ(q.scales[0], 0x7e);
  EXPECT_EQ(q.codes[0], 0x77);
}

TEST(Nvfp4, Bf16InputEqualsTheSameValuesAsF32) {
  std::vector<float> x = random_row(16, 8, 3);
  std::vector<bf16> rounded(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    rounded[i] = float_to_bf16(x[i]);
    x[i] = bf16_to_float(rounded[i]);
  }
  const EncodeScale gs = nvfp4_encode_scale(amax_of(x));
  EXPECT_TRUE(same_bytes(quantize(rounded, gs).codes, quantize(x, gs).codes));
  EXPECT_TRUE(same_bytes(quantize(rounded, gs).scales, quantize(x, gs).scales));
}

TEST(Nvfp4, PerTokenUsesTheRowsOwnScale) {
  const std::vector<float> x = random_row(4, 6, 9);
  std::vector<bf16> rounded(x.size());
  for (size_t i = 0; i < x.size(); ++i) rounded[i] = float_to_bf16(x[i]);
  std::vector<uint8_t> codes(x.size() / 2), scales(x.size() / 16);
  const EncodeScale gs = nvfp4_encode_scale(amax_of(x));
  const DecodeScale r = nvfp4_quantize_row_per_token(x.data(), 64, codes.data(), scales.data());
  EXPECT_EQ(r.value, 1 / gs.value);
  EXPECT_TRUE(same_bytes(codes, quantize(x, gs).codes));
  EXPECT_TRUE(same_bytes(scales, quantize(x, gs).scales));
  EXPECT_EQ(*std::max_element(scales.begin(), scales.end()), 0x7e) << "the row's largest block uses 448";
  const DecodeScale r16 = nvfp4_quantize_row_per_token(rounded.data(), 64, codes.data(), scales.data());
  EXPECT_NEAR(r16.value, r.value, r.value * 0x1p-8);
}

TEST(Nvfp4, PerTokenRowOfZeros) {
  const std::vector<float> x(32, 0);
  std::vector<uint8_t> codes(16, 0xaa), scales(2, 0xaa);
  EXPECT_EQ(nvfp4_quantize_row_per_token(x.data(), 32, codes.data(), scales.data()).value, 0);
  EXPECT_EQ(codes, std::vector<uint8_t>(16, 0));
  EXPECT_EQ(scales, std::vector<uint8_t>(2, 0));
}

TEST(Nvfp4, EmptyRowWritesNothing) {
  uint8_t untouched = 7;
  nvfp4_quantize_row(static_cast<const float*>(nullptr), 0, EncodeScale{1}, &untouched, &untouched);
  EXPECT_EQ(untouched, 7);
}

// The largest code's step is 2, so an element within the range has an error of at most one code unit, sf * d.
// The error of an element that the rounding of sf moves out of the range is at most its distance to 6 units.
// sf is 0 if s <= 2^-10.
RC_GTEST_PROP(Nvfp4Property, ErrorIsAtMostAUnitAndWhatTheScaleCutsOff, (uint32_t seed)) {
  const std::vector<float> x = random_row(4, 12, seed);
  const EncodeScale gs = nvfp4_encode_scale(amax_of(x));
  const Quantized q = quantize(x, gs);
  const std::vector<float> y = dequantize(q, to_decode(gs));
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t block = i / 16 * 16;
    const double amax = amax_of({x.begin() + block, x.begin() + block + 16});
    const double unit = static_cast<double>(scale_value(q.scales[i / 16])) / gs.value;
    const double limit = unit > 0 ? std::max(unit, amax - 6 * unit) : 6 * 0x1p-10 / gs.value;
    RC_ASSERT(std::abs(static_cast<double>(y[i]) - x[i]) <= limit * (1 + 0x1p-20) + amax * 0x1p-20);
  }
}

RC_GTEST_PROP(Nvfp4Property, QuantisingTheResultAgainChangesNothing, (uint32_t seed)) {
  const std::vector<float> x = random_row(4, 4, seed);
  const EncodeScale gs = nvfp4_encode_scale(amax_of(x));
  const Quantized q = quantize(x, gs);
  for (uint8_t byte : q.scales)
    RC_PRE(byte >= 0x08);  // not idempotent for subnormal scales, which round by up to one half
  const Quantized again = quantize(dequantize(q, to_decode(gs)), gs);
  RC_ASSERT(again.scales == q.scales);
  RC_ASSERT(again.codes == q.codes);
}

// w4a4 on CPUs and SM90 relies on this: both operands of a product are exact in bf16.
TEST(Nvfp4, CodeTimesBlockScaleIsExactInBf16) {
  for (int scale = 0; scale < 0x7f; ++scale)
    for (int code = 0; code < 16; code += 2) {
      const std::vector<uint8_t> codes(8, static_cast<uint8_t>(code | (code + 1) << 4));
      const auto scale_byte = static_cast<uint8_t>(scale);
      std::vector<float> x(16);
      nvfp4_dequantize_row(codes.data(), &scale_byte, 16, DecodeScale{1}, x.data());
      for (int odd = 0; odd < 2; ++odd) {
        const float value = x[static_cast<size_t>(odd)];
        const double magnitude = oracle::e2m1_magnitudes()[static_cast<size_t>((code + odd) % 8)] *
                                 oracle::e4m3_magnitudes()[static_cast<size_t>(scale)];
        ASSERT_EQ(value, code < 8 ? magnitude : -magnitude);
        ASSERT_EQ(bf16_to_float(float_to_bf16(value)), value) << "code " << code + odd << " scale " << scale;
      }
    }
}

}  // namespace
}  // namespace fp4moe
