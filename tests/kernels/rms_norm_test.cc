#include <cmath>
#include <tuple>

#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

class RmsNorm : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {
 protected:
  const DenseOps& ops() const { return *std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  ThreadPool pool_{2};

  struct Outputs {
    std::vector<float> act, f32;
  };
  Outputs run(const DenseOps& table, const std::vector<float>& x, const std::vector<float>& weight,
              ThreadPool& pool) {
    const int64_t cols = static_cast<int64_t>(weight.size()), rows = static_cast<int64_t>(x.size()) / cols;
    ActBuffer act(dtype(), rows, cols);
    std::vector<float> f32(x.size());
    table.rms_norm({x.data(), weight.data(), 1e-5f, act.view(), f32.data()}, pool);
    return {act.values(), f32};
  }
  void expect_matches_ref(int64_t rows, int64_t cols) {
    Random random(5);
    const std::vector<float> x = random.normal(rows * cols, 3), weight = random.normal(cols);
    const Outputs actual = run(ops(), x, weight, pool_), expected = run(ref_dense_ops(), x, weight, pool_);
    // The mean's relative error of (cols / 16 + 5) eps is halved by the root; root, quotient and two products
    // round.
    const double relative = (static_cast<double>(cols) / 32 + 3 + 5) * kF32Eps;
    std::vector<float> f32_budget, act_budget;
    for (float y : expected.f32) {
      f32_budget.push_back(static_cast<float>(std::abs(y) * relative));
      // One bf16 step if the f32 difference crosses a rounding boundary.
      act_budget.push_back(dtype() == DType::kBF16 ? static_cast<float>(std::abs(y) * 2.02 * kBf16Eps)
                                                   : f32_budget.back());
    }
    ASSERT_TRUE(within_budget(actual.f32, expected.f32, f32_budget)) << rows << " x " << cols;
    ASSERT_TRUE(within_budget(actual.act, expected.act, act_budget)) << rows << " x " << cols;
    for (size_t i = 0; i < actual.act.size(); ++i)
      ASSERT_EQ(actual.act[i], dtype() == DType::kBF16 ? round_to_bf16(actual.f32[i]) : actual.f32[i]);
  }
};

TEST_P(RmsNorm, EveryNumberOfRows) {
  for (int64_t rows = 0; rows <= 17; ++rows) expect_matches_ref(rows, 24);
}

TEST_P(RmsNorm, EveryWidth) {
  for (int64_t cols = 1; cols <= 70; ++cols) expect_matches_ref(3, cols);
  expect_matches_ref(2, 2880);
}

TEST_P(RmsNorm, ZerosStayZero) {
  for (float y : run(ops(), std::vector<float>(40), std::vector<float>(40, 1.0f), pool_).f32) EXPECT_EQ(y, 0);
}

TEST_P(RmsNorm, RowsAreIndependentOfBatchAndThreads) {
  Random random(6);
  const int64_t cols = 50, rows = 33;
  const std::vector<float> x = random.normal(rows * cols), weight = random.normal(cols);
  const std::vector<float> whole = run(ops(), x, weight, pool_).act;
  for (int64_t t = 0; t < rows; ++t) {
    const std::vector<float> row(x.begin() + t * cols, x.begin() + (t + 1) * cols);
    ASSERT_EQ(run(ops(), row, weight, pool_).act,
              std::vector<float>(whole.begin() + t * cols, whole.begin() + (t + 1) * cols));
  }
  for (int threads : {1, 3, 7}) {
    ThreadPool pool(threads);
    ASSERT_EQ(run(ops(), x, weight, pool).act, whole);
  }
}

TEST_P(RmsNorm, MayWorkInPlaceAndWithoutActRows) {
  Random random(8);
  std::vector<float> x = random.normal(3 * 20);
  const std::vector<float> weight = random.normal(20), expected = run(ops(), x, weight, pool_).f32;
  ops().rms_norm({x.data(), weight.data(), 1e-5f, {nullptr, dtype(), 3, 20}, x.data()}, pool_);
  EXPECT_EQ(x, expected);
}

INSTANTIATE_TEST_SUITE_P(Tables, RmsNorm,
                         testing::Combine(testing::ValuesIn(cpu_tables()),
                                          testing::Values(DType::kBF16, DType::kF32)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)->name) + "_" +
                                  dtype_name(std::get<1>(p.param));
                         });

TEST(RefRmsNorm, ByHand) {  // mean square (9 + 16) / 2 = 12.5, plus eps 3.5 = 16
  ThreadPool pool(1);
  const float x[] = {3, 4}, weight[] = {1, 2};
  float y[2];
  ref_dense_ops().rms_norm({x, weight, 3.5f, {nullptr, DType::kF32, 1, 2}, y}, pool);
  EXPECT_FLOAT_EQ(y[0], 0.75f);
  EXPECT_FLOAT_EQ(y[1], 2);
}

}  // namespace
}  // namespace fp4moe
