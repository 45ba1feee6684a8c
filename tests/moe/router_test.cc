#include "moe/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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

// ---- the rules of Qwen and DeepSeek ---------------------------------------------------------------

TopK choose(const std::vector<float>& logits, RoutingRule rule) {
  rule.num_experts = static_cast<int64_t>(logits.size());
  TopK r{std::vector<int32_t>(static_cast<size_t>(rule.top_k), -9),
         std::vector<float>(static_cast<size_t>(rule.top_k), -9)};
  choose_experts(logits.data(), rule, r.ids.data(), r.weights.data());
  return r;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double sqrt_softplus(double x) { return std::sqrt(std::log1p(std::exp(x))); }

// Returns the n best candidates in order of score; ties go to the lower id.
std::vector<int32_t> best_of(std::vector<int32_t> ids, const std::vector<float>& score, size_t n) {
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)];
  });
  ids.resize(n);
  return ids;
}

// A naive implementation of the families' definitions.
TopK naive_choice(const std::vector<float>& logits, const RoutingRule& rule) {
  const size_t experts = logits.size(), k = static_cast<size_t>(rule.top_k);
  std::vector<int32_t> all(experts);
  for (size_t e = 0; e < experts; ++e) all[e] = static_cast<int32_t>(e);
  std::vector<double> weight(experts);
  std::vector<float> score = logits;
  if (rule.scoring == RouterScoring::kSoftmaxTopk) {
    double sum = 0;
    for (float l : logits) sum += std::exp(double{l});
    for (size_t e = 0; e < experts; ++e) weight[e] = std::exp(double{logits[e]}) / sum;
  } else {
    for (size_t e = 0; e < experts; ++e) {
      weight[e] = static_cast<float>(
          rule.scoring == RouterScoring::kSigmoidGrouped ? sigmoid(logits[e]) : sqrt_softplus(logits[e]));
      score[e] =
          static_cast<float>(weight[e]) + (rule.correction_bias == nullptr ? 0 : rule.correction_bias[e]);
    }
    const size_t groups = static_cast<size_t>(rule.num_groups), size = experts / groups;
    std::vector<float> group_score(groups);
    std::vector<int32_t> group_ids(groups);
    for (size_t g = 0; g < groups; ++g) {
      std::vector<float> members(score.begin() + static_cast<int64_t>(g * size),
                                 score.begin() + static_cast<int64_t>((g + 1) * size));
      std::sort(members.rbegin(), members.rend());
      group_score[g] = size == 1 ? members[0] : members[0] + members[1];
      group_ids[g] = static_cast<int32_t>(g);
    }
    all.clear();
    std::vector<int32_t> kept = best_of(group_ids, group_score, static_cast<size_t>(rule.top_k_groups));
    std::sort(kept.begin(), kept.end());
    for (int32_t g : kept)
      for (size_t i = 0; i < size; ++i)
        all.push_back(static_cast<int32_t>(static_cast<size_t>(g) * size + i));
  }
  TopK r{best_of(all, score, k), {}};
  double sum = 0;
  for (int32_t id : r.ids) sum += weight[static_cast<size_t>(id)];
  for (int32_t id : r.ids)
    r.weights.push_back(static_cast<float>(weight[static_cast<size_t>(id)] / (rule.norm_top_k ? sum : 1) *
                                           rule.scaling_factor));
  return r;
}

TEST(RoutingRuleTest, AgreesWithTheDefinitionsOnRandomLogits) {
  Random random(5);
  for (int round = 0; round < 400; ++round) {
    const int64_t groups = random.integer(1, 6), size = random.integer(1, 8);
    RoutingRule rule;
    rule.scoring = std::array{RouterScoring::kSoftmaxTopk, RouterScoring::kSigmoidGrouped,
                              RouterScoring::kSqrtSoftplus}[static_cast<size_t>(random.integer(0, 2))];
    rule.num_groups = groups;
    rule.top_k_groups = random.integer(1, groups);
    rule.top_k = random.integer(1, rule.top_k_groups * size);
    rule.norm_top_k = round % 3 == 0;
    rule.scaling_factor = round % 5 == 0 ? 2.5f : 1.0f;
    std::vector<float> logits = random.normal(groups * size, 2);
    if (round % 4 == 0)  // with ties
      for (float& l : logits) l = std::round(l);
    const std::vector<float> bias = random.normal(groups * size, 0.3f);
    if (round % 7 != 0) rule.correction_bias = bias.data();
    const TopK actual = choose(logits, rule), expected = naive_choice(logits, rule);
    EXPECT_EQ(actual.ids, expected.ids) << "round " << round;
    for (size_t i = 0; i < actual.weights.size(); ++i)
      EXPECT_NEAR(actual.weights[i], expected.weights[i],
                  4 * kF32Eps * std::max(rule.scaling_factor, expected.weights[i]));
  }
}

TEST(RoutingRuleTest, TheCorrectionBiasJoinsTheChoiceOnly) {
  const float bias[] = {0, 0, 10, 0};
  const TopK r =
      choose({2, 1, -3, 0}, {.scoring = RouterScoring::kSigmoidGrouped, .top_k = 2, .correction_bias = bias});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{2, 0}));
  EXPECT_FLOAT_EQ(r.weights[0], static_cast<float>(sigmoid(-3)));
  EXPECT_FLOAT_EQ(r.weights[1], static_cast<float>(sigmoid(2)));
}

TEST(RoutingRuleTest, SqrtSoftplusOfSmallAndLargeLogits) {
  const float bias[] = {0, 0, 0, 20};
  const TopK r = choose(
      {-200, 3, 1000, 0},
      {.scoring = RouterScoring::kSqrtSoftplus, .top_k = 4, .scaling_factor = 1.5f, .correction_bias = bias});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{2, 3, 1, 0}));
  EXPECT_FLOAT_EQ(r.weights[0], static_cast<float>(1.5 * std::sqrt(1000.0)));
  EXPECT_FLOAT_EQ(r.weights[1], static_cast<float>(1.5 * std::sqrt(std::log(2.0))));
  EXPECT_FLOAT_EQ(r.weights[2], static_cast<float>(1.5 * sqrt_softplus(3)));
  EXPECT_FLOAT_EQ(r.weights[3], static_cast<float>(1.5 * std::exp(-100.0)));
}

TEST(RoutingRuleTest, ExpertsOfOtherGroupsAreNotChosen) {
  // Group 0 has the best expert, group 1 the best pair.
  const TopK r = choose({9, -9, 3, 3}, {.scoring = RouterScoring::kSigmoidGrouped,
                                        .top_k = 2,
                                        .num_groups = 2,
                                        .top_k_groups = 1,
                                        .norm_top_k = true});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{2, 3}));
  EXPECT_FLOAT_EQ(r.weights[0], 0.5f);
}

TEST(RoutingRuleTest, TheScalingFactorCountsExactlyOnce) {
  for (RouterScoring scoring : {RouterScoring::kTopkSoftmax, RouterScoring::kSoftmaxTopk,
                                RouterScoring::kSigmoidGrouped, RouterScoring::kSqrtSoftplus})
    for (bool norm : {false, true}) {
      RoutingRule rule = {.scoring = scoring, .top_k = 2, .norm_top_k = norm};
      const TopK plain = choose({0.5f, 2, -1, 1}, rule);
      rule.scaling_factor = 4;
      const TopK scaled = choose({0.5f, 2, -1, 1}, rule);
      EXPECT_EQ(scaled.ids, plain.ids);
      for (size_t i = 0; i < 2; ++i) EXPECT_EQ(scaled.weights[i], 4 * plain.weights[i]);
    }
}

TEST(RoutingRuleTest, NanRanksBelowEveryNumberUnderEveryRule) {
  for (RouterScoring scoring : {RouterScoring::kSigmoidGrouped, RouterScoring::kSqrtSoftplus}) {
    const RoutingRule grouped = {
        .scoring = scoring, .top_k = 2, .num_groups = 2, .top_k_groups = 1, .norm_top_k = true};
    const TopK avoided = choose({NAN, NAN, -5, -6}, grouped);
    EXPECT_EQ(avoided.ids, (std::vector<int32_t>{2, 3}));
    for (float w : avoided.weights) EXPECT_FALSE(std::isnan(w));
    const TopK chosen = choose({NAN, NAN, NAN, NAN}, grouped);
    EXPECT_EQ(chosen.ids, (std::vector<int32_t>{0, 1}));
    for (float w : chosen.weights) EXPECT_TRUE(std::isnan(w));
  }
  const TopK open = choose({NAN, 1, 2}, {.scoring = RouterScoring::kSoftmaxTopk, .top_k = 2});
  EXPECT_EQ(open.ids, (std::vector<int32_t>{2, 1}));
  for (float w : open.weights) EXPECT_TRUE(std::isnan(w));
}

TEST(BypassedTopkTest, BecomesWhatEveryTokenAloneWouldChoose) {
  Random random(9);
  ThreadPool pool(3);
  const std::vector<float> logits = random.normal(70 * 8);  // rows of 8, of which 6 are logits
  const RoutingRule rule = {
      .scoring = RouterScoring::kSoftmaxTopk, .num_experts = 6, .top_k = 2, .norm_top_k = true};
  std::vector<int32_t> ids(140, -9);
  std::vector<float> weights(140, -9);
  to_standard({logits.data(), 70, 8, rule}, ids.data(), weights.data(), pool);
  for (size_t t = 0; t < 70; ++t) {
    const TopK alone = choose(
        {logits.begin() + static_cast<int64_t>(8 * t), logits.begin() + static_cast<int64_t>(8 * t + 6)},
        rule);
    EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), ids.begin() + static_cast<int64_t>(2 * t)));
    EXPECT_TRUE(std::equal(alone.weights.begin(), alone.weights.end(),
                           weights.begin() + static_cast<int64_t>(2 * t)));
  }
  to_standard({nullptr, 0, 8, rule}, nullptr, nullptr, pool);  // no tokens
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
    const ExpertRouter router = std::move(*ExpertRouter::make(weights, shape, ops));
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
        // Logits of magnitude up to about 30 have at most 48 rounding errors; the softmax's slope is below 1.
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
  EXPECT_EQ(ExpertRouter::make(c.weights, c.shape, ref_expert_ops()).status().message(),
            "router bias has 7 elements, but num_experts is 8");
}

TEST(RouterMakeTest, RefusesGroupsThatDoNotFit) {
  const auto refusal = [](int64_t groups, int64_t top_groups) {
    RouterCase c(8, 16, 4);
    c.weights.num_groups = groups;
    c.weights.top_k_groups = top_groups;
    return ExpertRouter::make(c.weights, c.shape, ref_expert_ops()).status().message();
  };
  EXPECT_EQ(refusal(3, 1), "n_group=3 does not divide num_experts=8 evenly (at most 256 groups)");
  EXPECT_EQ(refusal(4, 5), "topk_group=5 must be between 1 and n_group=4");
  EXPECT_EQ(refusal(4, 1), "top_k=4 is more than the 2 experts in topk_group=1 groups");
}

}  // namespace
}  // namespace fp4moe
