#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct RopeCase {
  int64_t tokens;
  int heads, head_dim, rotary_dim;
  std::vector<int64_t> positions;
  std::vector<float> inv_freq, x;
  float attention_factor = 1.25f;

  RopeCase(int64_t t, int h, int d, int rotary) : tokens(t), heads(h), head_dim(d), rotary_dim(rotary) {
    Random random(9);
    for (int64_t i = 0; i < t; ++i) positions.push_back(i % 3 == 0 ? random.integer(0, 200000) : i);
    for (int i = 0; i < rotary / 2; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / rotary));
    x = random.normal(t * stride());
  }
  int64_t stride() const { return heads * head_dim + 3; }
  std::vector<float> run(const DenseOps& ops, ThreadPool& pool) const {
    std::vector<float> y = x;
    ops.rope({.x = y.data(),
              .positions = positions.data(),
              .inv_freq = inv_freq.data(),
              .attention_factor = attention_factor,
              .num_tokens = tokens,
              .row_stride = stride(),
              .num_heads = heads,
              .head_dim = head_dim,
              .rotary_dim = rotary_dim},
             pool);
    return y;
  }
};

class Rope : public testing::TestWithParam<const DenseOps*> {};

TEST_P(Rope, MatchesRef) {
  ThreadPool pool(2);
  for (int rotary : {2, 6, 16, 30, 32, 34, 64, 128})
    for (int extra : {0, 5})
      for (int64_t tokens : {0, 1, 7, 8, 9, 40}) {
        const RopeCase c(tokens, 3, rotary + extra, rotary);
        // Sine (to f32), factor, product and sum round once each: 4 eps for each of the two terms.
        float largest = 0;
        for (float v : c.x) largest = std::max(largest, std::abs(v));
        const float budget[] = {static_cast<float>(4 * kF32Eps * 2 * largest * c.attention_factor)};
        ASSERT_TRUE(within_budget(c.run(*GetParam(), pool), c.run(ref_dense_ops(), pool), budget))
            << rotary << "+" << extra << ", T=" << tokens;
      }
}

TEST_P(Rope, LeavesTheRestAlone) {
  ThreadPool pool(1);
  const RopeCase c(5, 2, 20, 12);
  const std::vector<float> y = c.run(*GetParam(), pool);
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t i = 0; i < c.stride(); ++i)
      if (i >= c.heads * c.head_dim || i % c.head_dim >= c.rotary_dim) {
        ASSERT_EQ(y[t * c.stride() + i], c.x[t * c.stride() + i]);
      }
}

TEST_P(Rope, QuarterTurnSwapsHalves) {
  ThreadPool pool(1);
  RopeCase c(1, 1, 2, 2);
  c.positions = {1};
  c.inv_freq = {std::numbers::pi_v<float> / 2};
  c.attention_factor = 1;
  c.x = {2, 3, 7, 7, 7};
  const std::vector<float> y = c.run(*GetParam(), pool);
  EXPECT_NEAR(y[0], -3, 1e-6);
  EXPECT_NEAR(y[1], 2, 1e-6);
}

TEST_P(Rope, SameBitsForEveryThreadCount) {
  ThreadPool one(1);
  const RopeCase c(50, 2, 64, 64);
  const std::vector<float> expected = c.run(*GetParam(), one);
  for (int threads : {2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(c.run(*GetParam(), pool), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, Rope, testing::ValuesIn(cpu_tables()),
                         [](const auto& p) { return std::string(p.param->name); });

TEST(Rope, SameBitsOnEveryIsa) {
  ThreadPool pool(1);
  const RopeCase c(50, 2, 64, 64);
  for (const DenseOps* ops : cpu_tables())
    EXPECT_EQ(c.run(*ops, pool), c.run(cpu_dense_ops(Isa::kScalar), pool));
}

}  // namespace
}  // namespace fp4moe
