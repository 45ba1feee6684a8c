#include "engine/step/ngram_drafter.h"

#include <gtest/gtest.h>

#include <random>

namespace fp4moe {
namespace {

using Tokens = std::vector<int32_t>;

TEST(NgramDraft, ContinuesTheLongestMatch) {
  const Tokens tokens = {1, 2, 3, 7, 2, 3, 8, 9, 1, 2, 3};
  EXPECT_EQ(ngram_draft(tokens, {.max_tokens = 3, .min_match = 1, .max_match = 8}), (Tokens{7, 2, 3}));
  EXPECT_EQ(ngram_draft(tokens, {.max_tokens = 3, .min_match = 1, .max_match = 2}), (Tokens{8, 9, 1}))
      << "the latest of equal matches";
  EXPECT_EQ(ngram_draft(tokens, {.max_tokens = 3, .min_match = 4, .max_match = 8}), Tokens());
}

TEST(NgramDraft, ARunRepeatsBeyondItsEnd) {
  EXPECT_EQ(ngram_draft(Tokens{4, 4}, {.max_tokens = 4, .min_match = 1, .max_match = 3}),
            (Tokens{4, 4, 4, 4}));
  EXPECT_EQ(ngram_draft(Tokens{5, 6, 5, 6}, {.max_tokens = 5, .min_match = 2, .max_match = 3}),
            (Tokens{5, 6, 5, 6, 5}));
}

TEST(NgramDraft, FewTokensGiveNone) {
  for (const Tokens& tokens : {Tokens{}, Tokens{1}, Tokens{1, 2}})
    EXPECT_EQ(ngram_draft(tokens, {.max_tokens = 4, .min_match = 1, .max_match = 3}), Tokens());
}

// Tries every length from the longest down and every place from the last one back.
Tokens by_trial(const Tokens& tokens, const NgramLimits& limits) {
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t length = limits.max_match; length >= limits.min_match; --length)
    for (int64_t end = n - 1; end >= length; --end) {
      if (!std::equal(tokens.begin() + (end - length), tokens.begin() + end, tokens.end() - length)) continue;
      Tokens all = tokens;
      for (int64_t i = 0; i < limits.max_tokens; ++i) all.push_back(all[static_cast<size_t>(end + i)]);
      return {all.begin() + n, all.end()};
    }
  return {};
}

TEST(NgramDraft, EqualsATrialOfAllMatches) {
  std::mt19937 random(3);
  int64_t num_drafts = 0;
  for (int round = 0; round < 4000; ++round) {
    Tokens tokens(random() % 40);
    for (int32_t& id : tokens) id = static_cast<int32_t>(random() % (2 + static_cast<uint32_t>(round) % 5));
    const auto min_match = static_cast<int64_t>(1 + random() % 4);
    const NgramLimits limits{.max_tokens = static_cast<int64_t>(1 + random() % 6),
                             .min_match = min_match,
                             .max_match = min_match + static_cast<int64_t>(random() % 6)};
    const Tokens draft = ngram_draft(tokens, limits);
    num_drafts += draft.empty() ? 0 : 1;
    EXPECT_EQ(draft, by_trial(tokens, limits)) << "round " << round;
  }
  EXPECT_GT(num_drafts, 1000);
}

}  // namespace
}  // namespace fp4moe
