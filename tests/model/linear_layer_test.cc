// A rank's part of a linear layer: rows in any order, columns, biases; in bf16, FP4 and FP8.
#include "model/linear_layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <list>
#include <random>

#include "base/check.h"
#include "formats/e4m3.h"
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

// FP8 parts in every granularity: stacked, with permuted rows and cut columns, against element-wise sums.
class Fp8Layers : public testing::Test {
 protected:
  static constexpr int64_t kN = 300, kK = 330;

  // A [n, kK] matrix; the scales differ by a power of two from one block to the next.
  LinearWeightsView matrix(int64_t n, int64_t row_block, int64_t col_block) {
    std::vector<uint8_t>& codes = codes_.emplace_back();
    for (int64_t i = 0; i < n * kK; ++i)
      codes.push_back(static_cast<uint8_t>(random_() % 2 * 128 + random_() % 127));
    std::vector<float> scales;
    for (int64_t i = 0; i < (n + row_block - 1) / row_block * ((kK + col_block - 1) / col_block); ++i)
      scales.push_back(std::ldexp(1.25f, static_cast<int>(random_() % 9) - 12));
    LinearWeightsView view{.n = n, .k = kK};
    view.fp8_scales = std::make_shared<const std::vector<float>>(std::move(scales));
    view.fp8 = {codes.data(), view.fp8_scales->data(), row_block, col_block};
    return view;
  }
  static double value(const LinearWeightsView& w, int64_t row, int64_t col) {
    const int64_t per_row = (w.k + w.fp8.col_block - 1) / w.fp8.col_block;
    return static_cast<double>(e4m3_decode(w.fp8.codes[row * w.k + col])) *
           static_cast<double>(w.fp8.scales[row / w.fp8.row_block * per_row + col / w.fp8.col_block]);
  }
  void expect_sums(const std::vector<LinearPart>& parts) {
    const auto layer = LinearLayer::make(MoePlan(), cpu_dense_ops(best_isa()), parts, pool_);
    ASSERT_TRUE(layer.ok()) << layer.status().to_string();
    const int64_t k = parts[0].num_cols();
    std::vector<float> x(static_cast<size_t>(k)), out(static_cast<size_t>(layer->n())), want;
    for (float& v : x) v = std::normal_distribution<float>()(random_);
    Arena scratch = std::move(*Arena::make(layer->scratch_bytes(1)));
    layer->forward_linear({x.data(), DType::kF32, 1, k}, out.data(), false, scratch, pool_);
    for (const LinearPart& part : parts)
      for (int64_t i = 0; i < part.num_rows(); ++i) {
        double sum = 0;
        for (int64_t c = 0; c < k; ++c)
          sum += static_cast<double>(x[static_cast<size_t>(c)]) *
                 value(part.weights, part.source_row(i), part.cols.first + c);
        want.push_back(static_cast<float>(sum));
      }
    EXPECT_TRUE(within_relative_l2(out, want, 1e-6));
  }

  std::mt19937 random_{5};
  std::list<std::vector<uint8_t>> codes_;
  ThreadPool pool_{2};
};

TEST_F(Fp8Layers, PartsOfEveryGranularityAreStacked) {
  const std::pair<int64_t, int64_t> blocks[] = {{kN, kK}, {1, kK}, {128, 128}};
  for (const auto& [row_block, col_block] : blocks) {
    const LinearWeightsView q = matrix(kN, row_block, col_block),
                            v = matrix(70, std::min<int64_t>(row_block, 70), col_block);
    expect_sums({{q, {}, {}}});
    expect_sums({{q, {}, {}}, {v, {}, {}}});
    expect_sums({{q, row_range(96, 64), {}}, {v, row_range(1, 13), {}}, {matrix(40, 40, kK), {}, {}}});
    expect_sums({{q, {299, 0, 7, 7, 130, 131, 128, 127}, {}}});
  }
}

TEST_F(Fp8Layers, ColumnsMayCutBlocksAtMultiplesOf32) {
  for (const auto& [row_block, col_block] : {std::pair<int64_t, int64_t>{kN, kK}, {1, kK}, {128, 128}})
    for (const Shard cols : {Shard{0, 160}, Shard{160, 170}, Shard{32, 96}, Shard{96, 64}, Shard{256, 74}})
      expect_sums({{matrix(kN, row_block, col_block), row_range(100, 100), cols}});
  expect_sums({{matrix(kN, 128, 128), {}, {129, 100}}});  // within one block
  expect_sums({{matrix(kN, kN, kK), {}, {17, 100}}});
  const auto cut = LinearLayer::make(MoePlan(), ref_dense_ops(),
                                     std::vector{LinearPart{matrix(kN, 128, 128), {}, {112, 32}}}, pool_);
  EXPECT_EQ(cut.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(cut.status().message().find("[112, 144)"), std::string::npos) << cut.status().message();
}

TEST_F(Fp8Layers, AreRefusedByOpsWithoutFp8) {
  DenseOps ops = ref_dense_ops();
  ops.has_fp8 = false;
  const auto layer =
      LinearLayer::make(MoePlan(), ops, std::vector{LinearPart{matrix(kN, kN, kK), {}, {}}}, pool_);
  EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported);
}

INSTANTIATE_TEST_SUITE_P(Bf16AndFp4, LinearLayers, testing::Bool());

}  // namespace
}  // namespace fp4moe
