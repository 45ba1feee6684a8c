// Compares the exponential of the CPU kernels with std::exp in double over the whole range.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/dense_chunks.h"
#include "kernels/dense_case.h"

namespace fp4moe {
namespace {

struct IsaChunks {
  Isa isa;
  const DenseChunks* chunks;
};

std::vector<IsaChunks> isa_chunks() {
  std::vector<IsaChunks> all = {{Isa::kScalar, &cpu_scalar::dense_chunks}};
#if defined(__x86_64__)
  if (isa_available(Isa::kAvx2)) all.push_back({Isa::kAvx2, &cpu_avx2::dense_chunks});
  if (isa_available(Isa::kAvx512)) all.push_back({Isa::kAvx512, &cpu_avx512::dense_chunks});
#endif
  return all;
}

class VecExp : public testing::TestWithParam<IsaChunks> {
 protected:
  static std::vector<float> exp(const std::vector<float>& x) {
    std::vector<float> y(x.size());
    GetParam().chunks->exp(x.data(), static_cast<int64_t>(x.size()), y.data());
    return y;
  }
};

TEST_P(VecExp, KeepsItsErrorBound) {
  std::vector<float> x;
  for (float v = -87; v <= 88.7f; v += 0.00037f) x.push_back(v);
  for (float v = 1e-30f; v < 1; v *= 1.01f) x.push_back(v), x.push_back(-v);
  for (int n = -125; n <= 127; ++n)  // around the reduction's boundaries
    for (int ulp = -2; ulp <= 2; ++ulp)
      x.push_back(static_cast<float>((n + 0.5) * std::log(2.0)) * (1 + static_cast<float>(ulp) * 0x1p-23f));
  const std::vector<float> y = exp(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] < -87 || x[i] > 88.7f) continue;
    const double exact = std::exp(static_cast<double>(x[i])), error = std::abs(y[i] / exact - 1);
    ASSERT_LT(error, 2.5e-7) << "x=" << x[i];
    worst = std::max(worst, error);
  }
  RecordProperty("worst_relative_error", std::to_string(worst));
  EXPECT_GT(worst, 0);
}

TEST_P(VecExp, Edges) {
  const float infinity = std::numeric_limits<float>::infinity(),
              lowest = std::numeric_limits<float>::lowest();
  const std::vector<float> y = exp({0, -0.0f, -87.5f, -200, lowest, -infinity, 89, infinity, -NAN, NAN,
                                    std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0x7fffffffu)});
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 1);
  for (int i = 2; i < 6; ++i) EXPECT_EQ(y[i], 0) << i;
  for (int i = 6; i < 8; ++i) EXPECT_NEAR(y[i] / std::exp(88.7), 1, 1e-5) << i;
  for (int i = 8; i < 12; ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Isas, VecExp, testing::ValuesIn(isa_chunks()),
                         [](const auto& p) { return std::string(isa_name(p.param.isa)); });

}  // namespace
}  // namespace fp4moe
