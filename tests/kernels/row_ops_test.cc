// Tests the ops that copy, add or scale rows, in every CPU table.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_floats(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(rng);
  return values;
}

class RowOps : public testing::TestWithParam<const DenseOps*> {
 protected:
  const DenseOps& ops() const { return *GetParam(); }
  ThreadPool pool_{2};
};

TEST_P(RowOps, AddAddsEveryElementOnce) {
  for (const int64_t n : {0, 1, 37, 40000, 70001}) {
    const std::vector<float> x = random_floats(n, 1);
    std::vector<float> out = random_floats(n, 2), want = out;
    for (size_t i = 0; i < x.size(); ++i) want[i] += x[i];
    ops().add({x.data(), out.data(), n}, pool_);
    EXPECT_EQ(out, want);
  }
}

TEST_P(RowOps, GatherTakesTheRowsInOrder) {
  const std::vector<float> x = random_floats(7 * 5, 3);
  const int64_t rows[] = {0, 2, 3, 6};
  std::vector<float> out(4 * 5 + 1, kNaN);
  ops().gather_rows({x.data(), out.data(), rows, 4, 5 * 4}, pool_);
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t c = 0; c < 5; ++c)
      EXPECT_EQ(out[static_cast<size_t>(i * 5 + c)], x[static_cast<size_t>(rows[i] * 5 + c)]);
  EXPECT_TRUE(std::isnan(out.back()));
  ops().gather_rows({x.data(), out.data(), rows, 0, 5 * 4}, pool_);
}

TEST_P(RowOps, CopyHeadsMovesEachHeadAndNothingElse) {
  const int64_t tokens = 19, heads = 3, n = 4, x_head = 6, out_head = 10;
  const std::vector<float> x = random_floats(tokens * heads * x_head, 4);
  std::vector<float> out(static_cast<size_t>(tokens * heads * out_head), kNaN);
  ops().copy_heads(
      {x.data() + 2, heads * x_head, x_head, out.data() + 5, heads * out_head, out_head, tokens, n, 3},
      pool_);
  for (int64_t i = 0; i < tokens * heads; ++i)
    for (int64_t c = 0; c < out_head; ++c) {
      const float got = out[static_cast<size_t>(i * out_head + c)];
      if (c >= 5 && c < 5 + n)
        EXPECT_EQ(got, x[static_cast<size_t>(i * x_head + 2 + c - 5)]);
      else
        EXPECT_TRUE(std::isnan(got)) << i << ", " << c;
    }
}

// Strided rows to f32 and to bf16, including values whose nearest bf16 is decided by the last bits.
TEST_P(RowOps, ConvertRowsRoundsEachElementAndNothingElse) {
  const int64_t tokens = 19, n = 7, x_stride = 9, out_stride = 11;
  std::vector<float> x = random_floats(tokens * x_stride, 10);
  x[0] = 1 + 0x1p-8f, x[1] = 1 + 3 * 0x1p-8f, x[2] = 1 + 0x1p-8f + 0x1p-20f, x[3] = -0.0f;
  for (const int64_t count : {int64_t{0}, int64_t{1}, tokens}) {
    std::vector<float> same(static_cast<size_t>(tokens * out_stride), kNaN);
    std::vector<bf16> rounded(same.size(), float_to_bf16(kNaN));
    ops().convert_rows({x.data(), x_stride, same.data() + 2, DType::kF32, out_stride, count, n}, pool_);
    ops().convert_rows({x.data(), x_stride, rounded.data() + 2, DType::kBF16, out_stride, count, n}, pool_);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < out_stride; ++c) {
        const auto at = static_cast<size_t>(t * out_stride + c);
        if (t < count && c >= 2 && c < 2 + n) {
          const float value = x[static_cast<size_t>(t * x_stride + c - 2)];
          EXPECT_EQ(same[at], value);
          EXPECT_EQ(bf16_to_float(rounded[at]), bf16_to_float(float_to_bf16(value)));
        } else {
          EXPECT_TRUE(std::isnan(same[at]) && std::isnan(bf16_to_float(rounded[at]))) << t << ", " << c;
        }
      }
  }
}

TEST_P(RowOps, SigmoidGateScalesEachTokenByItsOwn) {
  const int64_t tokens = 33, h = 48;
  const std::vector<float> x = random_floats(tokens * h, 5), weight = random_floats(h, 6);
  std::vector<float> out = random_floats(tokens * h, 7);
  const std::vector<float> before = out;
  ops().sigmoid_gate({x.data(), weight.data(), out.data(), tokens, h}, pool_);
  for (int64_t t = 0; t < tokens; ++t) {
    double logit = 0;
    for (int64_t i = 0; i < h; ++i)
      logit += double{x[static_cast<size_t>(t * h + i)]} * weight[static_cast<size_t>(i)];
    const double gate = 1 / (1 + std::exp(-logit));
    for (int64_t i = 0; i < h; ++i) {
      const auto at = static_cast<size_t>(t * h + i);
      EXPECT_NEAR(out[at], before[at] * gate, 1e-6 * std::abs(before[at]));
    }
  }
}

TEST_P(RowOps, HeadLinearScalesItsSums) {
  const int64_t n = 16, k = 8;
  std::vector<bf16> weight,
      panels(static_cast<size_t>(linear_weight_bytes(n, k, ops().head_linear_layout) / 2));
  for (const float v : random_floats(n * k, 8)) weight.push_back(float_to_bf16(v));
  pack_linear_weight(weight.data(), n, k, ops().head_linear_layout, panels.data(), pool_);
  const std::vector<float> x = random_floats(3 * k, 9);
  std::vector<float> plain(3 * n, kNaN), scaled(3 * n, kNaN);
  HeadLinearArgs args{.x = x.data(),
                      .x_stride = k,
                      .x_head_stride = k,
                      .weight = panels.data(),
                      .out = plain.data(),
                      .out_stride = n,
                      .out_head_stride = n,
                      .num_tokens = 3,
                      .n = n,
                      .k = k,
                      .num_heads = 1};
  ops().head_linear(args, pool_);
  args.out = scaled.data();
  args.scale = 0.25f;
  ops().head_linear(args, pool_);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(scaled[i], 0.25f * plain[i]);
}

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = {&ref_dense_ops()};
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (isa_available(isa)) tables.push_back(&cpu_dense_ops(isa));
  return tables;
}

INSTANTIATE_TEST_SUITE_P(Tables, RowOps, testing::ValuesIn(all_tables()),
                         [](const auto& p) { return std::string(p.param->name); });

}  // namespace
}  // namespace fp4moe
