// Tests head_norm, head_linear and silu_mul of every table.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "base/buffer.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = cpu_tables();
  tables.push_back(&ref_dense_ops());
  return tables;
}

// Fills the gaps between heads and between rows; the ops must not write the gaps.
constexpr float kGap = 42;

class HeadNorm : public testing::TestWithParam<const DenseOps*> {
 protected:
  static constexpr float kEps = 1e-5f;
  static std::vector<float> run(std::vector<float> x, int64_t tokens, int heads, int head_dim,
                                const std::vector<float>& weight, ThreadPool& pool) {
    const int64_t stride = tokens == 0 ? 0 : static_cast<int64_t>(x.size()) / tokens;
    GetParam()->head_norm({x.data(), weight.data(), kEps, tokens, stride, heads, head_dim}, pool);
    return x;
  }
};

TEST_P(HeadNorm, IsWithinBudgetAndLeavesTheRestAlone) {
  ThreadPool pool(2);
  for (int head_dim : {1, 2, 7, 15, 16, 17, 31, 64, 80, 128, 512})
    for (auto [tokens, heads] : {std::pair{0, 3}, {1, 1}, {2, 5}, {9, 2}, {17, 3}}) {
      Random random(static_cast<uint64_t>(head_dim));
      const int64_t stride = heads * head_dim + 3;
      const std::vector<float> x = random.normal(tokens * stride, 3), weight = random.normal(head_dim);
      std::vector<float> expected = x, budget(x.size(), 0.0f);
      for (int64_t t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
          float* row = expected.data() + t * stride + h * head_dim;
          double squares = 0;
          for (int d = 0; d < head_dim; ++d) squares += static_cast<double>(row[d]) * row[d];
          for (int d = 0; d < head_dim; ++d) {
            row[d] = static_cast<float>(row[d] / std::sqrt(squares / head_dim + kEps) * weight[d]);
            // The mean's error of (head_dim / 16 + 6) eps is halved by the root; root, quotient and two
            // products round.
            budget[t * stride + h * head_dim + d] =
                static_cast<float>(std::abs(row[d]) * (head_dim / 32.0 + 3 + 5) * kF32Eps);
          }
        }
      EXPECT_TRUE(within_budget(run(x, tokens, heads, head_dim, weight, pool), expected, budget))
          << tokens << " x " << heads << " x " << head_dim;
    }
}

TEST_P(HeadNorm, ATokenGivesTheSameBitsAloneAndInAnyBatch) {
  constexpr int kHeads = 3, kDim = 40, kStride = kHeads * kDim;
  Random random(2);
  const std::vector<float> x = random.normal(30 * kStride), weight = random.normal(kDim);
  ThreadPool one(1), three(3);
  const std::vector<float> whole = run(x, 30, kHeads, kDim, weight, three);
  for (int64_t t = 0; t < 30; ++t) {
    const std::vector<float> alone =
        run({x.begin() + t * kStride, x.begin() + (t + 1) * kStride}, 1, kHeads, kDim, weight, one);
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), whole.begin() + t * kStride)) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, HeadNorm, testing::ValuesIn(all_tables()),
                         [](const auto& p) { return std::string(p.param->name); });

struct HeadLinearCase {
  int64_t tokens, n, k;
  int heads;
  std::vector<float> x;
  std::vector<bf16> weight;

  HeadLinearCase(int64_t t, int h, int64_t n_, int64_t k_) : tokens(t), n(n_), k(k_), heads(h) {
    Random random(static_cast<uint64_t>(n * 1000 + k));
    x = random.normal(t * x_stride());
    weight = to_bf16(random.normal(h * n * k));
  }
  // The heads of x are not contiguous (a rope part separates them), and neither are the heads of out.
  int64_t x_head_stride() const { return k + 5; }
  int64_t x_stride() const { return heads * x_head_stride() + 2; }
  int64_t out_head_stride() const { return n + 3; }
  int64_t out_stride() const { return heads * out_head_stride() + 1; }

  std::vector<float> run(const DenseOps& ops, DType out_dtype, ThreadPool& pool, int64_t first = 0,
                         int64_t rows = -1) const {
    if (rows < 0) rows = tokens;
    const int64_t bytes = linear_weight_bytes(n, k, ops.head_linear_layout);
    Buffer packed = *Buffer::make(heads * bytes);
    for (int h = 0; h < heads; ++h)
      pack_linear_weight(weight.data() + h * n * k, n, k, ops.head_linear_layout,
                         reinterpret_cast<bf16*>(packed.data() + h * bytes), pool);
    ActBuffer out(out_dtype, rows, out_stride(),
                  std::vector<float>(static_cast<size_t>(rows * out_stride()), kGap));
    ops.head_linear({.x = x.data() + first * x_stride(),
                     .x_stride = x_stride(),
                     .x_head_stride = x_head_stride(),
                     .weight = packed.as<bf16>(),
                     .out = out.view().data,
                     .out_dtype = out_dtype,
                     .out_stride = out_stride(),
                     .out_head_stride = out_head_stride(),
                     .num_tokens = rows,
                     .n = n,
                     .k = k,
                     .num_heads = heads},
                    pool);
    return out.values();
  }

  // Computes the sums in double. An f32 sum of k rounded products in any order has an error of at most (k +
  // 1) eps sum |x w|.
  void expect(DType out_dtype, std::vector<float>& values, std::vector<float>& budget) const {
    values.assign(static_cast<size_t>(tokens * out_stride()), kGap);
    budget.assign(values.size(), 0.0f);
    for (int64_t t = 0; t < tokens; ++t)
      for (int h = 0; h < heads; ++h)
        for (int64_t row = 0; row < n; ++row) {
          double sum = 0, magnitude = 0;
          for (int64_t i = 0; i < k; ++i) {
            const double term = static_cast<double>(x[t * x_stride() + h * x_head_stride() + i]) *
                                bf16_to_float(weight[(h * n + row) * k + i]);
            sum += term, magnitude += std::abs(term);
          }
          const int64_t at = t * out_stride() + h * out_head_stride() + row;
          values[at] = static_cast<float>(sum);
          const double rounding = (out_dtype == DType::kBF16 ? kBf16Eps : kF32Eps) * std::abs(sum);
          budget[at] =
              static_cast<float>(1.01 * (rounding + static_cast<double>(k + 1) * kF32Eps * magnitude) +
                                 std::numeric_limits<float>::min());
        }
  }
};

class HeadLinear : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {
 protected:
  const DenseOps& ops() const { return *std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  ThreadPool pool_{2};

  void expect_within_budget(const HeadLinearCase& c) {
    std::vector<float> expected, budget;
    c.expect(dtype(), expected, budget);
    ASSERT_TRUE(within_budget(c.run(ops(), dtype(), pool_), expected, budget))
        << "T=" << c.tokens << " heads=" << c.heads << " N=" << c.n << " K=" << c.k;
  }
};

TEST_P(HeadLinear, EveryNumberOfTokens) {
  for (int64_t t = 0; t <= 17; ++t) expect_within_budget({t, 3, 35, 33});
  expect_within_budget({100, 2, 16, 8});
}
TEST_P(HeadLinear, EveryNumberOfOutputs) {
  for (int64_t n = 1; n <= 35; ++n) expect_within_budget({3, 2, n, 18});
  expect_within_budget({5, 2, 130, 18});
}
TEST_P(HeadLinear, EveryDepth) {
  for (int64_t k = 1; k <= 35; ++k) expect_within_budget({5, 2, 17, k});
  expect_within_budget({13, 2, 48, 512});
}

TEST_P(HeadLinear, IsBatchInvariant) {
  const HeadLinearCase c(120, 3, 70, 65);
  const std::vector<float> whole = c.run(ops(), dtype(), pool_);
  for (auto [first, rows] :
       {std::pair<int64_t, int64_t>{0, 1}, {119, 1}, {5, 3}, {8, 5}, {30, 12}, {3, 110}}) {
    const std::vector<float> part = c.run(ops(), dtype(), pool_, first, rows);
    ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first * c.out_stride()))
        << rows << " rows from " << first;
  }
  ThreadPool seven(7);
  ASSERT_EQ(whole, c.run(ops(), dtype(), seven));
}

const auto kTablesAndTypes =
    testing::Combine(testing::ValuesIn(all_tables()), testing::Values(DType::kBF16, DType::kF32));
std::string table_and_type(const testing::TestParamInfo<std::tuple<const DenseOps*, DType>>& p) {
  return std::string(std::get<0>(p.param)->name) + "_" + dtype_name(std::get<1>(p.param));
}
INSTANTIATE_TEST_SUITE_P(Tables, HeadLinear, kTablesAndTypes, table_and_type);

class SiluMul : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {
 protected:
  std::vector<float> run(const std::vector<float>& gate_up, int64_t rows, int64_t cols) {
    const auto& [ops, dtype] = GetParam();
    ActBuffer out(dtype, rows, cols);
    ops->silu_mul({gate_up.data(), out.view()}, pool_);
    return out.values();
  }
  ThreadPool pool_{2};
};

TEST_P(SiluMul, IsWithinBudget) {
  const double result_eps = std::get<1>(GetParam()) == DType::kBF16 ? kBf16Eps : kF32Eps;
  for (int64_t cols : {1, 2, 15, 16, 17, 33, 100, 2047, 2048, 2049, 4100})
    for (int64_t rows : {0, 1, 3, 9}) {
      const std::vector<float> gate_up = Random(4).normal(rows * 2 * cols, 5);
      std::vector<float> expected, budget;
      for (int64_t t = 0; t < rows; ++t)
        for (int64_t i = 0; i < cols; ++i) {
          const double g = gate_up[t * 2 * cols + i], u = gate_up[t * 2 * cols + cols + i];
          const double y = g / (1 + std::exp(-g)) * u;
          expected.push_back(static_cast<float>(y));
          // exp has a relative error of 2.5e-7; its argument, the sum, the quotient and the product round.
          budget.push_back(static_cast<float>(std::abs(y) * (2.5e-7 + 4 * kF32Eps + 1.01 * result_eps) +
                                              std::numeric_limits<float>::min()));
        }
      EXPECT_TRUE(within_budget(run(gate_up, rows, cols), expected, budget)) << rows << " x " << cols;
    }
}

TEST_P(SiluMul, HasHandCheckedValuesAndKeepsNan) {
  const float three = std::log(3.0f);  // sigmoid 3/4
  const std::vector<float> y = run({0, three, -100, NAN, 1, 5, 4, 3, 2, NAN}, 1, 5);
  EXPECT_EQ(y[0], 0);
  EXPECT_NEAR(y[1], three * 3, 3 * three * kBf16Eps);
  EXPECT_NEAR(y[2], 0, 1e-30);
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_TRUE(std::isnan(y[4]));
}

INSTANTIATE_TEST_SUITE_P(Tables, SiluMul, kTablesAndTypes, table_and_type);

}  // namespace
}  // namespace fp4moe
