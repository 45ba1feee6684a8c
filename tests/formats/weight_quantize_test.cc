#include "formats/weight_quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/mxfp4.h"
#include "formats/nvfp4.h"

namespace fp4moe {
namespace {

struct Row {
  std::vector<uint8_t> codes, scales;
  bool operator==(const Row&) const = default;
};

DecodeScale tensor_scale(Fp4Format format, const std::vector<float>& x) {
  if (format == Fp4Format::kMxfp4) return {1};
  float amax = 0;
  for (const float v : x) amax = std::max(amax, std::fabs(v));
  return to_decode(nvfp4_encode_scale(amax));
}

Row quantize(Fp4Format format, const std::vector<float>& x, ScaleSearch search) {
  Row row{std::vector<uint8_t>(x.size() / 2), std::vector<uint8_t>(x.size() / fp4_block(format))};
  quantize_weight_row(format, x, tensor_scale(format, x), search, row.codes.data(), row.scales.data());
  return row;
}

double scale_value(Fp4Format format, uint8_t byte, DecodeScale tensor) {
  return format == Fp4Format::kMxfp4 ? std::ldexp(1.0, byte - 127) : double{e4m3_decode(byte)} * tensor.value;
}

double block_error(Fp4Format format, const std::vector<float>& x, const Row& row, size_t block) {
  const size_t n = static_cast<size_t>(fp4_block(format));
  const double scale = scale_value(format, row.scales[block], tensor_scale(format, x));
  double sum = 0;
  for (size_t i = block * n; i < (block + 1) * n; ++i) {
    const uint8_t byte = row.codes[i / 2], code = i % 2 == 0 ? byte & 15 : byte >> 4;
    const double d = x[i] - double{kE2m1Values[code]} * scale;
    sum += d * d;
  }
  return sum;
}

// Returns the least error of a block over all scale bytes, with each element at its nearest value.
double least_error(Fp4Format format, const std::vector<float>& x, size_t block) {
  const size_t n = static_cast<size_t>(fp4_block(format));
  double least = INFINITY;
  for (int byte = 1; byte < (format == Fp4Format::kMxfp4 ? 0xff : 0x7f); ++byte) {
    const double scale = scale_value(format, static_cast<uint8_t>(byte), tensor_scale(format, x));
    double sum = 0;
    for (size_t i = block * n; i < (block + 1) * n; ++i) {
      double nearest = INFINITY;
      for (const float v : kE2m1Values) nearest = std::min(nearest, std::fabs(x[i] - double{v} * scale));
      sum += nearest * nearest;
    }
    least = std::min(least, sum);
  }
  return least;
}

std::vector<float> normal(size_t n, double sigma, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> draw(0, sigma);
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(draw(random));
  return x;
}

class EveryFormat : public testing::TestWithParam<Fp4Format> {};
INSTANTIATE_TEST_SUITE_P(WeightQuantize, EveryFormat, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                         [](const auto& test) { return std::string(fp4_format_name(test.param)); });

TEST_P(EveryFormat, AbsmaxIsTheFormatsRule) {
  const std::vector<float> x = normal(1024, 0.02, 1);
  Row expected{std::vector<uint8_t>(512), std::vector<uint8_t>(1024 / fp4_block(GetParam()))};
  if (GetParam() == Fp4Format::kMxfp4)
    mxfp4_quantize_row(x.data(), 1024, Mxfp4ScaleRule::kRoundUp, expected.codes.data(),
                       expected.scales.data());
  else
    nvfp4_quantize_row(x.data(), 1024, to_encode(tensor_scale(GetParam(), x)), expected.codes.data(),
                       expected.scales.data());
  EXPECT_EQ(quantize(GetParam(), x, ScaleSearch::kAbsmax), expected);
}

TEST_P(EveryFormat, SearchingIsNeverWorseAndMostlyTheBestThereIs) {
  const std::vector<float> x = normal(32 * 400, 0.02, 2);
  const Row plain = quantize(GetParam(), x, ScaleSearch::kAbsmax);
  const Row searched = quantize(GetParam(), x, ScaleSearch::kMse);
  size_t best = 0;
  double before = 0, after = 0;
  for (size_t b = 0; b < plain.scales.size(); ++b) {
    const double was = block_error(GetParam(), x, plain, b), is = block_error(GetParam(), x, searched, b);
    EXPECT_LE(is, was) << "block " << b;
    best += is <= least_error(GetParam(), x, b) * (1 + 1e-6);
    before += was;
    after += is;
  }
  EXPECT_GE(static_cast<double>(best), 0.97 * static_cast<double>(plain.scales.size()));
  EXPECT_LT(after, 0.95 * before);
}

TEST_P(EveryFormat, ValuesOfTheFormatComeBack) {
  const std::vector<float> x = normal(32 * 64, 1, 3);
  for (const ScaleSearch search : {ScaleSearch::kAbsmax, ScaleSearch::kMse}) {
    const Row row = quantize(GetParam(), x, search);
    std::vector<float> y(x.size()), again(x.size());
    const auto dequantize = [&](const Row& from, DecodeScale scale, std::vector<float>& to) {
      const int64_t cols = std::ssize(to);
      fp4_dequantize_row({GetParam(), 1, cols, from.codes.data(), from.scales.data(), cols / 2,
                          cols / fp4_block(GetParam()), scale.value},
                         0, to.data());
    };
    const DecodeScale scale = tensor_scale(GetParam(), x);
    dequantize(row, scale, y);
    Row second{std::vector<uint8_t>(row.codes.size()), std::vector<uint8_t>(row.scales.size())};
    quantize_weight_row(GetParam(), y, scale, ScaleSearch::kMse, second.codes.data(), second.scales.data());
    dequantize(second, scale, again);
    for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(again[i], y[i], 1e-6 * std::fabs(y[i])) << i;
  }
}

TEST_P(EveryFormat, ZerosAndLoneElements) {
  std::vector<float> x(96);
  x[40] = -3;
  for (const ScaleSearch search : {ScaleSearch::kAbsmax, ScaleSearch::kMse}) {
    const Row row = quantize(GetParam(), x, search);
    double error = 0;
    for (size_t b = 0; b < row.scales.size(); ++b) error += block_error(GetParam(), x, row, b);
    EXPECT_LT(error, 1e-9);
    EXPECT_EQ(row.codes[0], 0);
  }
}

}  // namespace
}  // namespace fp4moe
