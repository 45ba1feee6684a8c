#include "moe/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "kernels/expert_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct TopK {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

TopK topk(const std::vector<float>& logits, int64_t k) {
  TopK r{std::vector<int32_t>(static_cast<size_t>(k), -9), std::vector<float>(static_cast<size_t>(k), -9)};
  choose_experts(logits.data(), {.num_experts = static_cast<int64_t>(logits.size()), .top_k = k},
                 r.ids.data(), r.weights.data());
  return r;
}

TEST(TopkSoftmaxTest, BestFirstAndSoftmaxOverTheChosen) {
  const TopK r = topk({0.0f, 3.0f, -1.0f, 2.0f}, 2);
  EXPECT_EQ(r.ids, (std::vector<int32_t>{1, 3}));
  EXPECT_FLOAT_EQ(r.weights[0], static_cast<float>(1 / (1 + std::exp(-1.0))));
  EXPECT_FLOAT_EQ(r.weights[1], static_cast<float>(1 / (1 + std::exp(1.0))));
}

TEST(TopkSoftmaxTest, TiesGoToTheLowerId) {
  EXPECT_EQ(topk({1, 2, 2, 1, 2}, 2).ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(topk({1, 2, 2, 1, 2}, 4).ids, (std::vector<int32_t>{1, 2, 4, 0}));
  EXPECT_EQ(topk({-0.0f, 0.0f, -0.0f}, 3).ids, (std::vector<int32_t>{0, 1, 2}));
}

TEST(TopkSoftmaxTest, AllExpertsChosen) {
  const TopK r = topk({5, 7, 6}, 3);
  EXPECT_EQ(r.ids, (std::vector<int32_t>{1, 2, 0}));
  EXPECT_NEAR(r.weights[0] + r.weights[1] + r.weights[2], 1, 3 * kF32Eps);
}

TEST(TopkSoftmaxTest, NanRanksLastAndPoisonsOnlyWhereItIsChosen) {
  const TopK avoided = topk({NAN, 1, NAN, -kInf, 0.5f}, 2);
  EXPECT_EQ(avoided.ids, (std::vector<int32_t>{1, 4}));
  EXPECT_NEAR(avoided.weights[0] + avoided.weights[1], 1, 2 * kF32Eps);
  const TopK chosen = topk({NAN, 1, NAN, -kInf}, 3);
  EXPECT_EQ(chosen.ids, (std::vector<int32_t>{1, 3, 0}));
  for (float w : chosen.weights) EXPECT_TRUE(std::isnan(w));
}

TEST(TopkSoftmaxTest, AllNanGivesDistinctIdsInRange) {
  const TopK r = topk({NAN, NAN, NAN, NAN}, 3);
  EXPECT_EQ(r.ids, (std::vector<int32_t>{0, 1, 2}));
}

TEST(TopkSoftmaxTest, AgreesWithAStableSort) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const int64_t num_experts = random.integer(1, 40), k = random.integer(1, num_experts);
    std::vector<float> logits;
    for (int64_t e = 0; e < num_experts; ++e) logits.push_back(static_cast<float>(random.integer(-5, 5)));
    std::vector<int32_t> order(logits.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int32_t>(e);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(k));
    EXPECT_EQ(topk(logits, k).ids, order);
  }
}

class RouterTest : public testing::TestWithParam<const ExpertOps*> {};
INSTANTIATE_TEST_SUITE_P(Tables, RouterTest, testing::ValuesIn(expert_tables()),
                         [](const auto& row) { return std::string(row.param->name); });

struct RouterCase {
  RouterCase(int64_t num_experts, int64_t hidden_size, int64_t top_k)
      : shape{num_experts, hidden_size, top_k}, weight(to_bf16(random.normal(num_experts * hidden_size))) {
    weights.weight = weight.data();
    weights.bias = random.normal(num_experts);
  }
  TopK route(const ExpertOps& ops, const std::vector<float>& x, int threads) const {
    ThreadPool pool(threads);
    const Router router = std::move(*Router::make(weights, shape, ops));
    const int64_t tokens = static_cast<int64_t>(x.size()) / shape.hidden_size;
    Arena scratch = std::move(*Arena::make(router.scratch_bytes(tokens)));
    const Routes r = router.route(x.data(), tokens, scratch, pool);
    return {{r.ids, r.ids + tokens * shape.top_k}, {r.weights, r.weights + tokens * shape.top_k}};
  }

  Random random{17};
  RouterShape shape;
  std::vector<bf16> weight;
  RouterWeights weights;
};

TEST_P(RouterTest, RoutesLikeDoubleArithmetic) {
  for (int64_t num_experts : {1, 4, 16, 33, 128}) {
    RouterCase c(num_experts, 48, std::min<int64_t>(4, num_experts));
    const std::vector<float> x = c.random.normal(70 * 48);
    const TopK actual = c.route(*GetParam(), x, 2);
    for (size_t t = 0; t < 70; ++t) {
      std::vector<float> logits;
      for (int64_t e = 0; e < num_experts; ++e) {
        double sum = c.weights.bias[static_cast<size_t>(e)];
        for (int64_t h = 0; h < 48; ++h)
          sum += static_cast<double>(x[t * 48 + static_cast<size_t>(h)]) *
                 bf16_to_float(c.weight[static_cast<size_t>(e * 48 + h)]);
        logits.push_back(static_cast<float>(sum));
      }
      const TopK expected = topk(logits, c.shape.top_k);
      const size_t first = t * static_cast<size_t>(c.shape.top_k);
      for (size_t i = 0; i < expected.ids.size(); ++i) {
        EXPECT_EQ(actual.ids[first + i], expected.ids[i]);
        // Logits of magnitude up to about 30 are off by at most 48 roundings; the softmax's slope is below 1.
        EXPECT_NEAR(actual.weights[first + i], expected.weights[i], 2 * 48 * kF32Eps * 30);
      }
    }
  }
}

TEST_P(RouterTest, SameBitsAloneInABatchAndOnAnyNumberOfThreads) {
  RouterCase c(33, 50, 3);
  const std::vector<float> x = c.random.normal(67 * 50);
  const TopK batch = c.route(*GetParam(), x, 3), serial = c.route(*GetParam(), x, 1);
  EXPECT_EQ(batch.ids, serial.ids);
  EXPECT_EQ(batch.weights, serial.weights);
  for (size_t t = 0; t < 67; ++t) {
    const TopK alone = c.route(
        *GetParam(),
        {x.begin() + static_cast<int64_t>(t * 50), x.begin() + static_cast<int64_t>((t + 1) * 50)}, 1);
    EXPECT_TRUE(
        std::equal(alone.ids.begin(), alone.ids.end(), batch.ids.begin() + static_cast<int64_t>(t * 3)));
    EXPECT_TRUE(std::equal(alone.weights.begin(), alone.weights.end(),
                           batch.weights.begin() + static_cast<int64_t>(t * 3)));
  }
}

TEST(RouterMakeTest, RefusesABiasOfAnotherLength) {
  RouterCase c(8, 16, 2);
  c.weights.bias.resize(7);
  EXPECT_EQ(Router::make(c.weights, c.shape, ref_expert_ops()).status().message(),
            "router bias has 7 elements, num_experts is 8");
}

}  // namespace
}  // namespace fp4moe
