// Compares the GPU router's logits with double sums, and its ids and weights with the CPU's choice for the
// same logits.
#include "kernels/cuda/routing/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "device/graph.h"
#include "device/stream.h"
#include "kernels/cuda/guarded_memory.h"
#include "kernels/dense_case.h"
#include "moe/router.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Case {
  int64_t num_tokens = 1, hidden = 64;
  RoutingRule rule;
  std::vector<float> x, weight, bias, correction;  // weight: rounded to bf16; the biases can be empty
};

constexpr float kNormEps = 1e-5f;

struct Routed {
  std::vector<float> logits, weights;
  std::vector<int32_t> ids;
  std::vector<uint64_t> counts;  // for the first half of the tokens, starting at kCountsBefore
};
constexpr uint64_t kCountsBefore = uint64_t{1} << 40;

// A norm before the router: its weight and its outputs.
struct Norm {
  std::vector<float> weight, f32;
  std::vector<bf16> act;
};

void check_counts(const Case& c, const Routed& routed, int times) {
  std::vector<uint64_t> expected(static_cast<size_t>(c.rule.num_experts), kCountsBefore);
  for (int64_t i = 0; i < c.num_tokens / 2 * c.rule.top_k; ++i)
    expected[static_cast<size_t>(routed.ids[static_cast<size_t>(i)])] += static_cast<uint64_t>(times);
  EXPECT_EQ(routed.counts, expected);
}

// Returns the result of the last of `times` identical calls; more than one call replays a graph. can_share:
// several blocks may share a token's experts.
Routed route(const Case& c, int times = 1, Norm* norm = nullptr, bool can_share = true) {
  const int64_t n = c.num_tokens, experts = c.rule.num_experts, k = c.rule.top_k;
  const Guarded x(c.x), weight(to_bf16(c.weight)), bias(c.bias), correction(c.correction);
  const Guarded logits(n * experts * 4), ids(n * k * 4), weights(n * k * 4);
  const Guarded counts(std::vector<uint64_t>(static_cast<size_t>(experts), kCountsBefore));
  const Guarded num_rows(std::vector<int32_t>{static_cast<int32_t>(n / 2)});
  const std::vector<RouterWord> no_words(static_cast<size_t>(kRouterFewTokens * experts));
  const Guarded words{no_words};
  const Guarded norm_weight(norm == nullptr ? std::vector<float>() : norm->weight);
  const Guarded act(norm == nullptr ? 0 : n * c.hidden * 2), f32(norm == nullptr ? 0 : n * c.hidden * 4);
  const RmsNormArgs norm_args = {x.as<float>(),
                                 norm_weight.as<float>(),
                                 kNormEps,
                                 {act.data(), DType::kBF16, n, c.hidden},
                                 f32.as<float>()};
  const DeviceRouterArgs args = {.x = norm == nullptr ? x.as<float>() : f32.as<float>(),
                                 .weight = weight.as<bf16>(),
                                 .bias = c.bias.empty() ? nullptr : bias.as<float>(),
                                 .correction_bias = c.correction.empty() ? nullptr : correction.as<float>(),
                                 .num_tokens = n,
                                 .hidden_size = c.hidden,
                                 .rule = c.rule,
                                 .logits = logits.as<float>(),
                                 .ids = ids.as<int32_t>(),
                                 .weights = weights.as<float>(),
                                 .count = {counts.as<uint64_t>(), num_rows.as<int32_t>()},
                                 .norm = norm == nullptr ? nullptr : &norm_args,
                                 .words = can_share ? words.as<RouterWord>() : nullptr};
  Stream stream = Stream::make().value();
  StreamScope scope(stream);
  if (times == 1) {
    cuda_route(args);
  } else {
    const Graph graph = Graph::capture(stream, [&] {
                          cuda_route(args);
                          return Status();
                        }).value();
    for (int i = 0; i < times; ++i) graph.launch(stream);
  }
  const Status status = stream.synchronize();
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(words.values<RouterWord>(), no_words) << "not zero after a call";
  if (norm != nullptr) norm->f32 = f32.values<float>(), norm->act = act.values<bf16>();
  Routed routed = {logits.values<float>(), weights.values<float>(), ids.values<int32_t>(),
                   counts.values<uint64_t>()};
  check_counts(c, routed, times);
  return routed;
}

// Checks that the ids equal the CPU's choice for the GPU's logits, and that the weights are within a relative
// error of 1e-6.
void check_choice(const Case& c, const Routed& routed) {
  RoutingRule rule = c.rule;
  rule.correction_bias = c.correction.empty() ? nullptr : c.correction.data();
  const auto k = static_cast<size_t>(rule.top_k);
  std::vector<int32_t> ids(k);
  std::vector<float> weights(k);
  for (int64_t t = 0; t < c.num_tokens; ++t) {
    choose_experts(routed.logits.data() + t * rule.num_experts, rule, ids.data(), weights.data());
    const auto at = static_cast<size_t>(t) * k;
    for (size_t i = 0; i < k; ++i) {
      ASSERT_EQ(routed.ids[at + i], ids[i]) << "token " << t << ", choice " << i;
      const float actual = routed.weights[at + i];
      ASSERT_TRUE(std::isnan(weights[i]) ? std::isnan(actual)
                                         : actual == weights[i] || std::fabs(actual - weights[i]) <=
                                                                       1e-6f * std::fabs(weights[i]))
          << actual << " instead of " << weights[i] << ", token " << t << ", choice " << i;
    }
  }
}

void check_logits(const Case& c, const Routed& routed) {
  std::vector<float> expected, budget;
  for (int64_t t = 0; t < c.num_tokens; ++t)
    for (int64_t e = 0; e < c.rule.num_experts; ++e) {
      double sum = 0, magnitude = 0;
      for (int64_t h = 0; h < c.hidden; ++h) {
        const double term = static_cast<double>(c.x[static_cast<size_t>(t * c.hidden + h)]) *
                            c.weight[static_cast<size_t>(e * c.hidden + h)];
        sum += term, magnitude += std::fabs(term);
      }
      const double bias = c.bias.empty() ? 0 : c.bias[static_cast<size_t>(e)];
      expected.push_back(static_cast<float>(sum + bias));
      // x is split into three parts, whose products are summed in f32; the tensor cores truncate when they
      // align terms.
      budget.push_back(static_cast<float>((std::sqrt(3.0 * static_cast<double>(c.hidden)) + 8) * 2 * kF32Eps *
                                              (magnitude + std::fabs(bias)) +
                                          1e-30));
    }
  EXPECT_TRUE(within_budget(routed.logits, expected, budget));
}

Case random_case(int64_t num_tokens, int64_t hidden, const RoutingRule& rule, uint64_t seed) {
  Random random(seed);
  Case c{num_tokens, hidden, rule, random.normal(num_tokens * hidden), {}, {}, {}};
  c.weight = random.normal(rule.num_experts * hidden, 2 / std::sqrt(static_cast<float>(hidden)));
  for (float& w : c.weight) w = round_to_bf16(w);
  if (seed % 2 == 0) c.bias = random.normal(rule.num_experts);
  if (is_grouped(rule.scoring) && seed % 3 != 0) c.correction = random.normal(rule.num_experts, 0.3f);
  return c;
}

constexpr RouterScoring kScorings[] = {RouterScoring::kTopkSoftmax, RouterScoring::kSoftmaxTopk,
                                       RouterScoring::kSigmoidGrouped, RouterScoring::kSqrtSoftplus};

TEST(CudaRouter, MatchesDoubleSumsAndTheCpusChoice) {
  uint64_t seed = 0;
  for (const auto& [experts, hidden] :
       {std::pair<int64_t, int64_t>{1, 32}, {5, 96}, {33, 64}, {128, 2880}, {160, 416}, {384, 128}})
    for (int64_t t : {0, 1, 2, 7, 8, 9, 31, 64, 65, 130})
      for (RouterScoring scoring : kScorings) {
        RoutingRule rule = {
            .scoring = scoring, .num_experts = experts, .top_k = std::min<int64_t>(experts, 8)};
        rule.norm_top_k = ++seed % 2 == 0;
        rule.scaling_factor = seed % 5 == 0 ? 2.5f : 1.0f;
        const Case c = random_case(t, hidden, rule, seed);
        SCOPED_TRACE(std::to_string(experts) + " experts, H " + std::to_string(hidden) + ", T " +
                     std::to_string(t) + ", scoring " + std::to_string(static_cast<int>(scoring)));
        const Routed routed = route(c);
        check_logits(c, routed);
        check_choice(c, routed);
      }
}

// On Hopper, many tokens have another kernel from 64 experts on, with 64, 128 or 256 experts per block, which
// depends on both sizes.
TEST(CudaRouter, LogitsOfManyTokens) {
  uint64_t seed = 0;
  for (const auto& [experts, hidden] :
       {std::pair<int64_t, int64_t>{63, 64}, {64, 32}, {65, 96}, {200, 160}, {256, 416}, {385, 320}})
    for (int64_t t : {255, 256, 257, 383, 4097, 8190}) {
      if (t > 1000 && experts % 2 != 0 && hidden > 96) continue;  // the double sums would take long
      const Case c = random_case(t, hidden, {.num_experts = experts, .top_k = 8}, ++seed);
      SCOPED_TRACE(std::to_string(experts) + " experts, H " + std::to_string(hidden) + ", T " +
                   std::to_string(t));
      const Routed routed = route(c);
      check_logits(c, routed);
      check_choice(c, routed);
    }
}

TEST(CudaRouter, SizesOfPublishedModels) {
  RoutingRule rule = {.scoring = RouterScoring::kSigmoidGrouped,
                      .num_experts = 256,
                      .top_k = 8,
                      .num_groups = 8,
                      .top_k_groups = 4,
                      .norm_top_k = true,
                      .scaling_factor = 2.5f};
  for (int64_t t : {1, 4, 100, 300}) {
    const Case c = random_case(t, 7168, rule, static_cast<uint64_t>(t));
    const Routed routed = route(c);
    check_logits(c, routed);
    check_choice(c, routed);
  }
}

// Covers sizes that norm_route() supports and sizes that it does not.
TEST(CudaRouter, NormComesFirst) {
  ThreadPool pool(2);
  uint64_t seed = 0;
  for (const auto& [experts, hidden] : {std::pair<int64_t, int64_t>{1, 32},
                                        {5, 96},
                                        {33, 64},
                                        {32, 2880},
                                        {128, 2880},
                                        {256, 7168},
                                        {256, 2048},
                                        {77, 2048},
                                        {100, 4096},
                                        {40, 8192}})
    for (int64_t t : {1, 2, 7, 20, 64, 130}) {
      const RouterScoring scoring = kScorings[++seed % 4];
      Case c = random_case(
          t, hidden, {.scoring = scoring, .num_experts = experts, .top_k = std::min<int64_t>(experts, 8)},
          seed);
      for (float& x : c.x) x *= 3;
      SCOPED_TRACE(std::to_string(experts) + " experts, H " + std::to_string(hidden) + ", T " +
                   std::to_string(t));
      Norm norm{Random(seed + 99).normal(hidden), {}, {}};
      std::vector<float> expected(c.x.size());
      ActBuffer rounded(DType::kBF16, t, hidden);
      ref_dense_ops().rms_norm({c.x.data(), norm.weight.data(), kNormEps, rounded.view(), expected.data()},
                               pool);
      const Routed routed = route(c, 1, &norm), again = route(c, 20, &norm);
      std::vector<float> budget, act_budget;
      for (float y : expected) {
        budget.push_back(std::fabs(y) * static_cast<float>(kF32Eps) * 24 + 1e-30f);
        act_budget.push_back(std::fabs(y) * static_cast<float>(2 * kBf16Eps) + 1e-30f);
      }
      EXPECT_TRUE(within_budget(norm.f32, expected, budget));
      EXPECT_TRUE(within_budget(to_float(norm.act), rounded.values(), act_budget));
      Case normed = c;
      normed.x = expected;
      check_logits(normed, routed);
      check_choice(c, routed);
      EXPECT_TRUE(same_bits(routed.logits, again.logits) && same_bits(routed.weights, again.weights));
    }
}

// The numbers of tokens use blocks that share experts, then clusters of 2 blocks, then one block.
TEST(CudaRouter, NormAndLogitsHaveTheSameBitsForEveryT) {
  const RoutingRule rule = {.num_experts = 32, .top_k = 4};
  const Case all = random_case(130, 2880, rule, 6);
  Norm norm{Random(3).normal(2880), {}, {}};
  const Routed routed = route(all, 1, &norm);
  for (int64_t t : {5, 16, 17, 64, 67}) {
    Case part = all;
    part.num_tokens = t;
    part.x.resize(static_cast<size_t>(t * 2880));
    Norm part_norm{norm.weight, {}, {}};
    const Routed few = route(part, 1, &part_norm);
    const auto first = [](std::vector<float> values, size_t n) { return values.resize(n), values; };
    EXPECT_TRUE(same_bits(few.logits, first(routed.logits, few.logits.size()))) << t << " tokens";
    EXPECT_TRUE(same_bits(few.weights, first(routed.weights, few.weights.size()))) << t << " tokens";
    EXPECT_TRUE(same_bits(part_norm.f32, first(norm.f32, part_norm.f32.size()))) << t << " tokens";
  }
}

TEST(CudaRouter, NormComesFirstWithoutSharedExperts) {
  for (const int64_t t : {1, 3}) {
    const Case c =
        random_case(t, 2048, {.scoring = RouterScoring::kSoftmaxTopk, .num_experts = 256, .top_k = 8}, 11);
    Norm norm{Random(4).normal(2048), {}, {}};
    const Routed routed = route(c, 50, &norm, /*can_share=*/false);
    Case normed = c;
    normed.x = norm.f32;
    check_logits(normed, routed);
    check_choice(c, routed);
  }
}

// Warps choose for several tokens each.
TEST(CudaRouter, ManyTokens) {
  for (const auto& [experts, groups] : {std::pair<int64_t, int64_t>{32, 1}, {33, 3}, {256, 8}, {320, 10}})
    for (RouterScoring scoring : kScorings) {
      const Case c = random_case(9001, 32,
                                 {.scoring = scoring,
                                  .num_experts = experts,
                                  .top_k = 7,
                                  .num_groups = groups,
                                  .top_k_groups = (groups + 1) / 2},
                                 static_cast<uint64_t>(experts));
      check_choice(c, route(c));
    }
}

// x and the weights are multiples of 0.5, so the logits are exact and equal scores tie.
TEST(CudaRouter, TiesGoToTheLowerIdAndGroups) {
  Random random(5);
  for (int round = 0; round < 60; ++round) {
    RoutingRule rule = {
        .scoring = kScorings[round % 4], .num_groups = random.integer(1, 9), .norm_top_k = round % 3 == 0};
    rule.num_experts = rule.num_groups * random.integer(1, 40);
    rule.top_k_groups = random.integer(1, rule.num_groups);
    rule.top_k =
        random.integer(1, std::min<int64_t>(32, rule.num_experts / rule.num_groups *
                                                    (is_grouped(rule.scoring) ? rule.top_k_groups : 1)));
    Case c{random.integer(1, 90), 32, rule, {}, {}, {}, {}};
    for (int64_t i = 0; i < c.num_tokens * 32; ++i) c.x.push_back(static_cast<float>(random.integer(-1, 1)));
    for (int64_t i = 0; i < rule.num_experts * 32; ++i)
      c.weight.push_back(static_cast<float>(random.integer(-1, 1)) * 0.5f);
    if (round % 2 == 0)
      for (int64_t e = 0; e < rule.num_experts; ++e)
        c.correction.push_back(static_cast<float>(e % 3) * 0.25f);
    check_choice(c, route(c));
  }
}

TEST(CudaRouter, AllExpertsOfTheLargestSizes) {
  for (RouterScoring scoring : kScorings) {
    const Case all = random_case(5, 64, {.scoring = scoring, .num_experts = 32, .top_k = 32}, 4);
    check_choice(all, route(all));
    const Case large = random_case(
        3, 64, {.scoring = scoring, .num_experts = 1024, .top_k = 32, .num_groups = 256, .top_k_groups = 30},
        4);
    check_choice(large, route(large));
  }
}

TEST(CudaRouter, NanExpertsRankLastAndNanTokensStayAlone) {
  const float inf = std::numeric_limits<float>::infinity();
  const int64_t hidden = 96;
  for (const auto& [tokens, experts] : {std::pair<int64_t, int64_t>{70, 40}, {300, 72}})
    for (RouterScoring scoring : kScorings) {
      const RoutingRule rule = {
          .scoring = scoring, .num_experts = experts, .top_k = 6, .num_groups = 4, .top_k_groups = 2};
      Case c = random_case(tokens, hidden, rule, 4);
      const Routed clean = route(c);
      c.x[3 * hidden + 5] = NAN;
      c.x[4 * hidden + 5] = std::bit_cast<float>(0x7f800001u);  // its upper half is an infinity's
      c.x[64 * hidden + 1] = inf;
      c.x[65 * hidden + 1] = 1e38f;
      const Routed routed = route(c);
      check_choice(c, routed);
      for (int64_t i = 0; i < tokens * experts; ++i) {
        const int64_t t = i / experts;
        const float logit = routed.logits[static_cast<size_t>(i)];
        ASSERT_TRUE((t != 3 && t != 4) || std::isnan(logit));
        ASSERT_TRUE(t != 64 || !std::isfinite(logit));
        ASSERT_TRUE(t == 3 || t == 4 || t == 64 || t == 65 || logit == clean.logits[static_cast<size_t>(i)]);
      }
      for (int64_t e = 0; e < experts - 2; ++e) c.weight[static_cast<size_t>(e * hidden + 7)] = NAN;
      check_choice(c, route(c));
    }
}

TEST(CudaRouter, SameBitsOnEveryReplay) {
  for (int64_t t : {1, 40, 300}) {
    const Case c =
        random_case(t, 1056, {.scoring = RouterScoring::kSqrtSoftplus, .num_experts = 200, .top_k = 6}, 2);
    const Routed once = route(c), often = route(c, 200);
    EXPECT_TRUE(same_bits(once.logits, often.logits));
    EXPECT_TRUE(same_bits(once.weights, often.weights));
    EXPECT_EQ(once.ids, often.ids);
  }
}

}  // namespace
}  // namespace fp4moe
