#include "engine/output/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

namespace fp4moe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

SampledToken sample(std::vector<float> logits, const SamplingParams& params, double random = 0,
                    std::vector<int32_t> masked_ids = {}, const std::vector<LogitEdit>& edits = {}) {
  const Sampler sampler(static_cast<int64_t>(logits.size()), std::move(masked_ids));
  Result<SampledToken> token = sampler.sample(logits, params, random, edits);
  EXPECT_TRUE(token.ok()) << token.status().to_string();
  return token.ok() ? *token : SampledToken{.token_id = -1};
}

std::vector<float> random_logits(size_t vocab_size, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(vocab_size);
  for (float& x : logits) x = normal(generator);
  return logits;
}

// Computes the probability of drawing each id directly from the definition.
std::vector<double> expected_distribution(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<size_t> ranked(logits.size());
  std::iota(ranked.begin(), ranked.end(), 0);
  std::stable_sort(ranked.begin(), ranked.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (params.top_k > 0) ranked.resize(std::min(ranked.size(), static_cast<size_t>(params.top_k)));
  std::vector<double> weight(logits.size(), 0);
  double total = 0;
  for (const size_t id : ranked)
    total += weight[id] = std::exp((logits[id] - logits[ranked[0]]) / double{params.temperature});
  double kept = 0;
  for (size_t i = 0; i < ranked.size(); ++i) {
    if (i > 0 && kept >= double{params.top_p} * total) weight[ranked[i]] = 0;
    if (weight[ranked[i]] < double{params.min_p} * weight[ranked[0]]) weight[ranked[i]] = 0;
    kept += weight[ranked[i]];
  }
  for (double& w : weight) w /= kept;
  return weight;
}

TEST(Sampler, GreedyTakesTheLargestAndTiesGoToTheLowerId) {
  for (size_t vocab_size = 1; vocab_size <= 40; ++vocab_size)
    for (size_t best = 0; best < vocab_size; ++best) {
      std::vector<float> logits(vocab_size, -1);
      logits[best] = logits.back() = 3;
      EXPECT_EQ(sample(logits, {.temperature = 0}).token_id, static_cast<int32_t>(best));
    }
}

TEST(Sampler, RefusesNanAndInfinityAnywhere) {
  const Sampler sampler(33, {});
  for (size_t i = 0; i < 33; ++i)
    for (const float bad : {std::nanf(""), kInfinity})
      for (const float temperature : {0.0f, 1.0f}) {
        std::vector<float> logits(33, 0.5f);
        logits[i] = bad;
        EXPECT_EQ(sampler.sample(logits, {.temperature = temperature}, 0.5).status().code(),
                  StatusCode::kInternal);
      }
  std::vector<float> nothing(33, -kInfinity);
  EXPECT_FALSE(sampler.sample(nothing, {}, 0.5).ok());
}

TEST(Sampler, MinusInfinityIsNeverDrawn) {
  const std::vector<float> logits = {-kInfinity, 1, -kInfinity, 1, -kInfinity};
  for (const double random : {0.0, 0.25, 0.5, 0.75, 1 - 0x1p-53})
    for (const float top_p : {0.5f, 0.999f, 1.0f}) {
      const int32_t id = sample(logits, {.top_p = top_p}, random).token_id;
      EXPECT_TRUE(id == 1 || id == 3) << id;
    }
}

TEST(Sampler, MaskedIdsAreNeitherDrawnNorListedButCountInTheNormaliser) {
  const std::vector<float> logits = {5, 1, 5, 0};
  const SamplingParams greedy{.temperature = 0, .top_logprobs = 4};
  const SampledToken token = sample(logits, greedy, 0, {0, 2});
  EXPECT_EQ(token.token_id, 1);
  ASSERT_EQ(token.top.size(), 2u);
  EXPECT_EQ(token.top[0].token_id, 1);
  EXPECT_EQ(token.top[1].token_id, 3);
  const double total = 2 * std::exp(5.0) + std::exp(1.0) + 1;
  EXPECT_FLOAT_EQ(token.logprob, static_cast<float>(1 - std::log(total)));
}

TEST(Sampler, LogprobsAreOfTheUnscaledDistributionAndSumToOne) {
  const std::vector<float> logits = random_logits(20, 1);
  const SampledToken token = sample(logits, {.temperature = 0.3f, .top_k = 2, .top_logprobs = 20}, 0.9);
  ASSERT_EQ(token.top.size(), 20u);
  double sum = 0;
  for (const TokenLogprob& top : token.top) sum += std::exp(double{top.logprob});
  EXPECT_NEAR(sum, 1, 20 * 0x1p-23 * 16);  // each logprob rounded to float, |logprob| < 16
  EXPECT_TRUE(std::is_sorted(token.top.begin(), token.top.end(),
                             [](const auto& a, const auto& b) { return a.logprob > b.logprob; }));
  const auto listed = std::find_if(token.top.begin(), token.top.end(),
                                   [&](const auto& top) { return top.token_id == token.token_id; });
  EXPECT_EQ(listed->logprob, token.logprob);
}

TEST(Sampler, TopPEdges) {
  const std::vector<float> logits = random_logits(500, 2);
  const int32_t best = sample(logits, {.temperature = 0}).token_id;
  const double last = 1 - 0x1p-53;
  EXPECT_EQ(sample(logits, {.top_p = 1e-9f}, last).token_id, best);
  EXPECT_EQ(sample(logits, {.top_k = 1}, last).token_id, best);
  EXPECT_EQ(sample(logits, {.temperature = 1e-30f}, last).token_id, best);
  const std::vector<float> equal(7, 1.0f);  // each 1/7: 3/7 takes three ids, slightly more takes four
  EXPECT_EQ(sample(equal, {.top_p = 0.42f}, last).token_id, 2);
  EXPECT_EQ(sample(equal, {.top_p = 0.43f}, last).token_id, 3);
  EXPECT_EQ(sample(equal, {.top_k = 1000}, last).token_id, 6);
}

// Every id's interval of the random number is as long as its probability, so an even grid of random numbers
// reproduces the distribution to within one grid step per interval end.
TEST(Sampler, MeetsTheNaiveDistributionForAllCuts) {
  constexpr int kSteps = 4000;
  for (const float temperature : {0.25f, 1.0f, 3.0f})
    for (const int32_t top_k : {-1, 1, 3, 17, 64, 1000})
      for (const auto& [top_p, min_p] : {std::pair{0.1f, 0.0f},
                                         {0.5f, 0.0f},
                                         {0.9f, 0.05f},
                                         {0.999f, 0.3f},
                                         {1.0f, 0.0f},
                                         {1.0f, 1e-3f},
                                         {1.0f, 0.2f},
                                         {1.0f, 1.0f}}) {
        std::vector<float> logits = random_logits(64, 3);
        logits[9] = logits[40];  // a tie
        const SamplingParams params{
            .temperature = temperature, .top_p = top_p, .top_k = top_k, .min_p = min_p};
        const std::vector<double> expected = expected_distribution(logits, params);
        std::vector<double> drawn(logits.size(), 0);
        for (int i = 0; i < kSteps; ++i)
          drawn[static_cast<size_t>(sample(logits, params, (i + 0.5) / kSteps).token_id)] += 1.0 / kSteps;
        for (size_t id = 0; id < logits.size(); ++id)
          ASSERT_NEAR(drawn[id], expected[id], 1.0 / kSteps + 1e-12)
              << "id " << id << " temperature " << temperature << " top_k " << top_k << " top_p " << top_p
              << " min_p " << min_p;
      }
}

// The sampler chooses from the edited logits, but computes log-probabilities from the unedited ones.
TEST(Sampler, EditsChangeTheChoiceAndNotTheLogprobs) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const std::vector<float> logits = random_logits(50, seed);
    std::vector<float> changed = logits;
    std::vector<LogitEdit> edits;
    for (size_t id = seed % 3; id < 50; id += 1 + seed % 7) {
      const float add = id % 4 == 3 ? -kInfinity : static_cast<float>(id) / 25 - 1;
      const float scale = id % 3 == 0 ? 1.25f : 0.5f, bias = id % 5 == 0 ? 2.5f : 0.0f;
      edits.push_back({static_cast<int32_t>(id), add, scale, bias});
      const float sum = logits[id] + add;
      changed[id] = (sum < 0 ? sum * scale : sum / scale) + bias;
    }
    const SamplingParams params{.temperature = seed % 2 == 0 ? 0.0f : 1.0f,
                                .top_p = seed % 5 == 1 ? 0.7f : 1.0f,
                                .top_k = seed % 7 == 1 ? 5 : -1,
                                .top_logprobs = 4};
    const double random = (seed + 0.5) / 200;
    const SampledToken token = sample(logits, params, random, {8}, edits);
    EXPECT_EQ(token.token_id, sample(changed, params, random, {8}).token_id) << seed;
    const SampledToken own = sample(logits, params, random, {8});
    for (size_t k = 0; k < 4; ++k) {
      EXPECT_EQ(token.top[k].token_id, own.top[k].token_id);
      EXPECT_EQ(token.top[k].logprob, own.top[k].logprob);
    }
    double total = 0;
    for (const float x : logits) total += std::exp(double{x});
    EXPECT_NEAR(token.logprob, logits[static_cast<size_t>(token.token_id)] - std::log(total), 1e-5);
  }
}

TEST(Sampler, EditsThatLeaveNothingOrOverflow) {
  const Sampler sampler(2, {});
  std::vector<float> logits = {1, -kInfinity};
  const std::vector<LogitEdit> never = {{.token_id = 0, .add = -kInfinity}};
  EXPECT_EQ(sampler.sample(logits, {}, 0.5, never).status().message(),
            "all tokens that may be sampled have logit -infinity");
  EXPECT_EQ(sample({1, 3e38f}, {.temperature = 1}, 0.5, {}, {{.token_id = 1, .scale = 1e-38f}}).token_id, 1);
}

// The sampler chooses as if disallowed ids were removed from the logits, but reports the model's
// log-probabilities.
TEST(Sampler, ChoosesWhatIsAllowed) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    const std::vector<float> logits = random_logits(70, seed);
    std::vector<float> changed = logits;
    std::vector<uint32_t> allowed(3);
    for (size_t id = 0; id < 70; ++id) {
      const bool keeps = (id * 7 + seed) % (2 + seed % 5) == 0;
      if (keeps)
        allowed[id / 32] |= 1u << (id % 32);
      else
        changed[id] = -kInfinity;
    }
    allowed[2] |= ~0u << 6;  // bits from V on are ignored
    const SamplingParams params{
        .temperature = seed % 2 == 0 ? 0.0f : 1.0f, .top_k = seed % 3 == 0 ? 4 : -1, .top_logprobs = 3};
    const Sampler sampler(70, {});
    std::vector<float> row = logits, changed_row = changed, own_row = logits;
    const auto token = sampler.sample(row, params, 0.6, {}, allowed);
    ASSERT_TRUE(token.ok());
    EXPECT_EQ(token->token_id, sampler.sample(changed_row, params, 0.6)->token_id);
    const auto own = sampler.sample(own_row, params, 0.6);
    for (size_t k = 0; k < 3; ++k) EXPECT_EQ(token->top[k].logprob, own->top[k].logprob);
    double total = 0;
    for (const float x : logits) total += std::exp(double{x});
    EXPECT_NEAR(token->logprob, logits[static_cast<size_t>(token->token_id)] - std::log(total), 1e-5);
  }
  std::vector<float> row = random_logits(70, 1);
  EXPECT_EQ(
      Sampler(70, {}).sample(row, {.temperature = 0}, 0, {}, std::vector<uint32_t>(3)).status().message(),
      no_token().message());
}

TEST(Sampler, ScoresAGivenToken) {
  const Sampler sampler(30, {4});
  const std::vector<float> logits = random_logits(30, 9);
  double total = 0;
  for (const float x : logits) total += std::exp(double{x});
  for (int32_t id = 0; id < 30; ++id) {
    std::vector<float> row = logits;
    const SampledToken scored =
        sampler.score(row, id, {.top_logprobs = 3, .token_ids_logprob = {4, 0}}).value();
    EXPECT_EQ(scored.token_id, id);
    EXPECT_NEAR(scored.logprob, logits[static_cast<size_t>(id)] - std::log(total), 1e-5);
    ASSERT_EQ(scored.top.size(), 3u);
    EXPECT_NE(scored.top[0].token_id, 4);
    ASSERT_EQ(scored.ids.size(), 2u);  // a masked id is listed too
    EXPECT_EQ(scored.ids[0].token_id, 4);
    EXPECT_NEAR(scored.ids[0].logprob, logits[4] - std::log(total), 1e-5);
    EXPECT_NEAR(scored.ids[1].logprob, logits[0] - std::log(total), 1e-5);
  }
  std::vector<float> bad(30, std::nanf(""));
  EXPECT_FALSE(sampler.score(bad, 0, {.top_logprobs = 0}).ok());
}

// Chi-square over the engine's own random numbers, fixed seed: 15 degrees of freedom, 0.1% point 37.7.
TEST(Sampler, ChiSquareOfDrawnTokens) {
  const std::vector<float> logits = random_logits(16, 4);
  const SamplingParams params{.temperature = 1.5f};
  const std::vector<double> expected = expected_distribution(logits, params);
  constexpr int kDraws = 50000;
  std::vector<int> count(16, 0);
  for (int i = 0; i < kDraws; ++i)
    ++count[static_cast<size_t>(sample(logits, params, token_random(42, i)).token_id)];
  double chi_square = 0;
  for (size_t id = 0; id < 16; ++id) {
    const double mean = expected[id] * kDraws;
    chi_square += (count[id] - mean) * (count[id] - mean) / mean;
  }
  EXPECT_LT(chi_square, 37.7);
}

TEST(TokenRandom, IsInRangeAndDiffersBySeedAndPosition) {
  std::set<double> seen;
  for (uint64_t seed = 0; seed < 64; ++seed)
    for (int64_t position = 0; position < 64; ++position) {
      const double random = token_random(seed, position);
      EXPECT_GE(random, 0);
      EXPECT_LT(random, 1);
      EXPECT_EQ(random, token_random(seed, position));
      seen.insert(random);
    }
  EXPECT_EQ(seen.size(), 64u * 64u);
}

TEST(DerivedSeed, DiffersByOrdinal) {
  std::set<uint64_t> seen;
  for (uint64_t n = 0; n < 1000; ++n) seen.insert(derived_seed(7, n));
  EXPECT_EQ(seen.size(), 1000u);
}

}  // namespace
}  // namespace fp4moe
