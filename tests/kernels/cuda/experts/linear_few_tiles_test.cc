// Compares the GPU's linear layer with an FP4 matrix in tiles with double loops over the tiles.
#include "kernels/cuda/experts/linear_few_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "device/device_context.h"
#include "device/stream.h"
#include "kernels/cuda/sm90_expert_gemm_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr double kBf16Eps = 0x1p-8;

std::vector<bf16> as_bf16(const std::vector<float>& values) {
  std::vector<bf16> rounded;
  for (const float v : values) rounded.push_back(float_to_bf16(v));
  return rounded;
}

class LinearFewTiles : public testing::TestWithParam<Fp4Format> {
 protected:
  // The least N that the layer takes on this GPU: two row tiles of 64 per SM.
  static int64_t least_n() { return int64_t{2} * current_device().info().num_sms * 64; }
  TiledExpertsCase matrix(int64_t n, int64_t k, bool has_bias) const {
    return {GetParam(), {"matrix", 1, n, k, ActivationKind::kRelu2, has_bias}, 9};
  }
  std::vector<float> run(TiledLinearArgs args) {
    const DeviceArray<float> out(args.num_tokens * args.matrix.hidden_size);
    args.out = out.data();
    EXPECT_TRUE(linear_few_tiles_fits(args));
    linear_few_tiles(args);
    const Status status = stream_.synchronize();
    EXPECT_TRUE(status.ok()) << status.message();
    return out.values();
  }
  // x: [num_tokens, K] bf16 values.
  std::vector<float> run(const TiledExpertsCase& matrix, const std::vector<float>& x, int64_t num_tokens) {
    const DeviceArray<bf16> device_x(as_bf16(x));
    return run({matrix.on_device(), device_x.data(), nullptr, num_tokens, nullptr});
  }
  void check(int64_t n, int64_t k, const std::vector<int64_t>& tokens, bool has_bias = true) {
    TiledExpertsCase weights = matrix(n, k, has_bias);
    const int64_t most = *std::max_element(tokens.begin(), tokens.end());
    const std::vector<float> x = weights.random_bf16_values(most * k);
    std::vector<TiledExpertsCase::Sum> want;
    for (int64_t t = 0; t < most; ++t) weights.down(0, &x[static_cast<size_t>(t * k)], &want);
    std::vector<float> values, budget;
    for (const auto& sum : want) {
      values.push_back(static_cast<float>(sum.value));
      budget.push_back(static_cast<float>(sum.magnitude + 1e-7 * std::abs(sum.value)));
    }
    std::vector<float> all;
    for (const int64_t t : tokens) {
      const std::vector<float> found = run(weights, {x.begin(), x.begin() + t * k}, t);
      const auto end = static_cast<std::ptrdiff_t>(found.size());
      EXPECT_TRUE(within_budget(found, {values.begin(), values.begin() + end},
                                {budget.begin(), budget.begin() + end}))
          << "T=" << t << " N=" << n << " K=" << k;
      const size_t common = std::min(all.size(), found.size());
      EXPECT_TRUE(std::equal(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(common), found.begin()))
          << "a token's bits depend on T=" << t;
      if (found.size() > all.size()) all = found;
    }
  }

  Stream stream_ = std::move(*Stream::make());
  StreamScope scope_{stream_};
};

TEST_P(LinearFewTiles, EveryNumberOfTokens) {
  check(least_n() + 40, 96, {1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16});
}
// Rows that end within a tile, within a group of tiles, and shares of different sizes.
TEST_P(LinearFewTiles, EveryNumberOfRows) {
  for (const int64_t more : {0, 1, 63, 64, 65, 200, 511, 512, 513, 1000, 5 * 64 * 132})
    check(least_n() + more, 64, {1, 3, 9}, more % 2 == 0);
}
TEST_P(LinearFewTiles, EveryDepth) {
  const int64_t block = fp4_block(GetParam());
  for (const int64_t k : {block, 2 * block, 64 + block, int64_t{192}, int64_t{448}, int64_t{576}})
    check(least_n() + 700, k, {1, 16});
  check(least_n() + 700, 1024 + block, {1});
}
TEST_P(LinearFewTiles, HeadOfAModel) { check(31040, 2048, {2}, false); }

TEST_P(LinearFewTiles, NormLinearIsNormThenLinear) {
  for (const int64_t k : {int64_t{32}, int64_t{544}, int64_t{2048}}) {
    TiledExpertsCase weights = matrix(least_n() + 100, k, true);
    for (const int64_t t : {1, 4}) {
      const std::vector<float> residual = weights.random_floats(t * k), weight = weights.random_floats(k);
      std::vector<float> want, normed(static_cast<size_t>(k));
      for (int64_t token = 0; token < t; ++token) {
        double square = 0;
        for (int64_t i = 0; i < k; ++i) square += std::pow(residual[static_cast<size_t>(token * k + i)], 2.0);
        const double rms = std::sqrt(square / static_cast<double>(k) + 1e-5);
        for (int64_t i = 0; i < k; ++i)
          normed[static_cast<size_t>(i)] = static_cast<float>(residual[static_cast<size_t>(token * k + i)] /
                                                              rms * weight[static_cast<size_t>(i)]);
        std::vector<TiledExpertsCase::Sum> sums;
        weights.down(0, normed.data(), &sums);
        for (const auto& sum : sums) want.push_back(static_cast<float>(sum.value));
      }
      const DeviceArray<float> device_x(residual), device_weight(weight);
      const RmsNormArgs norm{
          device_x.data(), device_weight.data(), 1e-5f, {nullptr, DType::kBF16, t, k}, nullptr};
      EXPECT_TRUE(
          within_relative_l2(run({weights.on_device(), nullptr, &norm, t, nullptr}), want, 0.7 * kBf16Eps))
          << t << " x " << k;
    }
  }
}

TEST_P(LinearFewTiles, NanStaysWithItsToken) {
  TiledExpertsCase weights = matrix(least_n(), 96, false);
  for (const int64_t t : {6, 12}) {
    std::vector<float> x = weights.random_bf16_values(t * 96);
    x[2 * 96 + 5] = std::nanf("");
    const std::vector<float> values = run(weights, x, t);
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(std::isnan(values[i]), static_cast<int64_t>(i) / least_n() == 2) << i;
  }
}

TEST_P(LinearFewTiles, RefusesWhatItDoesNotRun) {
  TiledExperts experts{.format = GetParam(), .num_experts = 1};
  experts.hidden_size = least_n();
  experts.intermediate_size = 2048;
  const RmsNormArgs norm;
  const auto fits = [&](int64_t tokens, const RmsNormArgs* with) {
    return linear_few_tiles_fits({experts, nullptr, with, tokens, nullptr});
  };
  EXPECT_TRUE(fits(16, nullptr) && fits(4, &norm));
  EXPECT_FALSE(fits(17, nullptr));
  EXPECT_FALSE(fits(5, &norm));
  experts.intermediate_size = 7168;  // x of 16 tokens and a ring exceed an SM's shared memory
  EXPECT_TRUE(fits(8, nullptr));
  EXPECT_FALSE(fits(16, nullptr));
  experts.hidden_size -= 64;
  EXPECT_FALSE(fits(1, nullptr));
}

INSTANTIATE_TEST_SUITE_P(Formats, LinearFewTiles, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                         [](const auto& format) { return std::string(fp4_format_name(format.param)); });

}  // namespace
}  // namespace fp4moe
