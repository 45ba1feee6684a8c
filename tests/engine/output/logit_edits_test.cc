#include "engine/output/logit_edits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

namespace fp4moe {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

std::map<int32_t, LogitEdit> edits_of(const LogitEdits& edits, int64_t n) {
  std::vector<LogitEdit> list = {{.token_id = -1}};  // append() must keep existing entries
  edits.append(n, list);
  EXPECT_EQ(list.front().token_id, -1);
  std::map<int32_t, LogitEdit> by_id;
  for (auto edit = list.begin() + 1; edit != list.end(); ++edit)
    EXPECT_TRUE(by_id.emplace(edit->token_id, *edit).second) << edit->token_id << " twice";
  return by_id;
}

TEST(LogitEdits, NoneWithoutPenalties) {
  LogitEdits edits(SamplingParams{.logit_bias = {{5, 0.0f}}}, std::vector<int32_t>{7});
  edits.count(3);
  EXPECT_FALSE(edits.has_penalties());
  EXPECT_TRUE(edits_of(edits, 0).empty());
}

TEST(LogitEdits, PenaltiesAreOfTheCounts) {
  const SamplingParams sampling{
      .frequency_penalty = 0.5f, .presence_penalty = -0.25f, .repetition_penalty = 1.5f};
  LogitEdits edits(sampling, {});
  EXPECT_TRUE(edits.has_penalties());
  EXPECT_TRUE(edits_of(edits, 0).empty());
  std::mt19937 generator(1);
  std::map<int32_t, int> counts;
  for (int64_t n = 1; n < 200; ++n) {
    const auto id = static_cast<int32_t>(generator() % 40);
    edits.count(id);
    ++counts[id];
    const auto listed = edits_of(edits, n);
    ASSERT_EQ(listed.size(), counts.size());
    for (const auto& [token_id, count] : counts) {
      EXPECT_EQ(listed.at(token_id).add, -0.5f * static_cast<float>(count) + 0.25f);
      EXPECT_EQ(listed.at(token_id).scale, 1.5f);
      EXPECT_EQ(listed.at(token_id).bias, 0);
    }
  }
}

TEST(LogitEdits, BiasStandsBesidePenaltiesAndTheEndWaits) {
  const SamplingParams sampling{.presence_penalty = 1,
                                .logit_bias = {{3, 2.5f}, {9, -100.0f}},
                                .min_new_tokens = 2,
                                .stop_token_ids = {9, 11}};
  LogitEdits edits(sampling, std::vector<int32_t>{7});
  edits.count(3);
  for (const int64_t n : {0, 1}) {
    const auto listed = edits_of(edits, n);
    ASSERT_EQ(listed.size(), 4u);
    EXPECT_EQ(listed.at(3).add, -1);
    EXPECT_EQ(listed.at(3).bias, 2.5f);
    for (const int32_t id : {7, 9, 11}) EXPECT_EQ(listed.at(id).add, kNever);
  }
  const auto later = edits_of(edits, 2);
  ASSERT_EQ(later.size(), 2u);
  EXPECT_EQ(later.at(9).add, 0);
  EXPECT_EQ(later.at(9).bias, -100);

  SamplingParams ignoring = sampling;
  ignoring.ignore_eos = true;
  EXPECT_FALSE(edits_of(LogitEdits(ignoring, std::vector<int32_t>{7}), 0).contains(7));
}

TEST(LogitEdits, TheMostThatAStepHas) {
  SamplingParams sampling{.presence_penalty = 1, .min_new_tokens = 1000};
  for (int32_t id = 0; id < 1024; ++id) sampling.logit_bias.push_back({id, 1.0f});
  for (int32_t id = 2000; id < 2064; ++id) sampling.stop_token_ids.push_back(id);
  LogitEdits edits(sampling, std::vector<int32_t>{3000, 3001});
  constexpr int64_t kAnswer = 500;
  for (int32_t id = 0; id < kAnswer; ++id) edits.count(4000 + id);
  EXPECT_LE(std::ssize(edits_of(edits, 10)), max_logit_edits(1, kAnswer - 1, 2));
}

}  // namespace
}  // namespace fp4moe
