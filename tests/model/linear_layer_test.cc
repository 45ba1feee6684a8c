// A rank's part of a linear layer: rows in any order, columns, biases; in bf16 and in FP4.
#include "model/linear_layer.h"

#include <gtest/gtest.h>

#include <random>

#include "base/check.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kN = 40, kK = 96, kT = 5;

// A matrix [kN, kK] with bias, in bf16 or FP4, and rows to multiply.
class LinearLayers : public testing::TestWithParam<bool> {
 protected:
  LinearLayers() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kN * kK; ++i) weight_.push_back(float_to_bf16(normal(random)));
    for (int64_t i = 0; i < kN; ++i) bias_.push_back(float_to_bf16(normal(random)));
    for (int64_t i = 0; i < kN * kK / 2; ++i) codes_.push_back(static_cast<uint8_t>(random()));
    for (int64_t i = 0; i < kN * kK / 16; ++i) scales_.push_back(static_cast<uint8_t>(0x30 + random() % 16));
    for (int64_t i = 0; i < kT * kK; ++i) x_.push_back(normal(random));
    MoeProblem problem{.hidden_size = kK, .intermediate_size = 32, .num_experts = 2, .top_k = 1};
    problem.format = Fp4Format::kNvfp4;
    problem.activation.kind = ActivationKind::kSilu;
    problem.act_dtype = DType::kF32;
    plan_ = *plan_moe(problem, {.runner = "ref"});
  }

  LinearWeightsView view() const {
    LinearWeightsView view{
        .is_fp4 = GetParam(), .weight = weight_.data(), .bias = bias_.data(), .n = kN, .k = kK};
    view.fp4 = {.format = Fp4Format::kNvfp4,
                .rows = kN,
                .cols = kK,
                .codes = codes_.data(),
                .scales = scales_.data(),
                .code_stride_bytes = kK / 2,
                .scale_stride_bytes = kK / 16,
                .tensor_scale = 0.75f};
    return view;
  }
  double weight(int64_t n, int64_t k) const {
    return GetParam() ? fp4_at(view().fp4, n, k) : bf16_to_float(weight_[static_cast<size_t>(n * kK + k)]);
  }
  // Columns [cols.first, + count) of the rows times row n of the weight.
  float expected(int64_t t, int64_t n, Shard cols, bool with_bias) const {
    double sum = with_bias ? bf16_to_float(bias_[static_cast<size_t>(n)]) : 0;
    for (int64_t k = cols.first; k < cols.first + cols.count; ++k)
      sum += x_[static_cast<size_t>(t * kK + k)] * weight(n, k);
    return static_cast<float>(sum);
  }
  std::vector<float> forward(const LinearLayer& layer, Shard cols, std::vector<float> out) {
    std::vector<float> x;
    for (int64_t t = 0; t < kT; ++t)
      for (int64_t k = 0; k < cols.count; ++k) x.push_back(x_[static_cast<size_t>(t * kK + cols.first + k)]);
    const bool accumulate = !out.empty();
    out.resize(static_cast<size_t>(kT * layer.n()));
    Arena scratch = std::move(*Arena::make(layer.scratch_bytes(kT)));
    layer.forward_linear({x.data(), DType::kF32, kT, cols.count}, out.data(), accumulate, scratch, pool_);
    return out;
  }

  MoePlan plan_;
  ThreadPool pool_{2};
  std::vector<bf16> weight_, bias_;
  std::vector<uint8_t> codes_, scales_;
  std::vector<float> x_;
};

TEST_P(LinearLayers, RowsComeInTheOrderAskedFor) {
  const std::vector<int64_t> rows = {39, 0, 7, 7, 21};
  const auto layer =
      LinearLayer::make(plan_, ref_dense_ops(), std::vector{LinearPart{view(), rows, {}}}, pool_);
  ASSERT_TRUE(layer.ok()) << layer.status().to_string();
  std::vector<float> want;
  for (int64_t t = 0; t < kT; ++t)
    for (const int64_t n : rows) want.push_back(expected(t, n, {0, kK}, true));
  EXPECT_TRUE(within_relative_l2(forward(*layer, {0, kK}, {}), want, 1e-6));
}

TEST_P(LinearLayers, ColumnShardsAddUpToTheWhole) {
  LinearWeightsView without_bias = view();
  without_bias.bias = nullptr;
  std::vector<float> sum, want;
  for (const Shard cols : {Shard{0, 32}, Shard{32, 16}, Shard{48, 48}}) {
    const LinearPart part{cols.first == 0 ? view() : without_bias, {}, cols};
    const auto layer = LinearLayer::make(plan_, ref_dense_ops(), std::vector{part}, pool_);
    ASSERT_TRUE(layer.ok()) << layer.status().to_string();
    EXPECT_EQ(layer->k(), cols.count);
    sum = forward(*layer, cols, std::move(sum));
  }
  for (int64_t t = 0; t < kT; ++t)
    for (int64_t n = 0; n < kN; ++n) want.push_back(expected(t, n, {0, kK}, true));
  EXPECT_TRUE(within_relative_l2(sum, want, 1e-6));
}

TEST_P(LinearLayers, ColumnsThatCutAScaleBlockAreRefused) {
  const LinearPart part{view(), {}, {8, 16}};
  const auto layer = LinearLayer::make(plan_, ref_dense_ops(), std::vector{part}, pool_);
  EXPECT_EQ(layer.status().code(), GetParam() ? StatusCode::kUnsupported : StatusCode::kOk);
}

INSTANTIATE_TEST_SUITE_P(Bf16AndFp4, LinearLayers, testing::Bool());

}  // namespace
}  // namespace fp4moe
