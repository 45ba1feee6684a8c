// The choice of tactics for a GPU's layers, with a fake kernel table and with the real one.
#include "engine/startup/device_autotune.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "engine/startup/tactic_cache.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

constexpr bool any(const DeviceMoeArgs&) { return true; }
constexpr DeviceMoeTactic kTable[] = {
    {.name = "sorted", .fits = any},
    {.name = "few", .fits = [](const DeviceMoeArgs& a) { return a.num_tokens * a.topk <= 16; }},
    {.name = "dense", .fits = any}};
// The default tactic is few for up to 2 tokens and sorted for more.
const DeviceMoeOps kOps = {
    .name = "stand-in", .tactics = kTable, .default_tactic = [](const DeviceMoeArgs& a) {
      return static_cast<size_t>(a.num_tokens <= 2 ? 1 : 0);
    }};
constexpr size_t kSorted = 0, kFew = 1, kDense = 2;
const std::vector<int64_t> kBuckets = {1, 2, 4, 8, 1024};
const DeviceMoeArgs kSizes = {.topk = 4};

bool always() { return true; }
std::vector<int> chosen(const DeviceTactics& tactics) {
  return {tactics.chosen.begin(), tactics.chosen.end()};
}

TEST(DeviceTactics, AnswersByTheFirstBucketThatHoldsTheTokens) {
  const DeviceTactics tactics{{1, 4, 64}, {2, 0, 1}};
  EXPECT_EQ(tactics.of(0), 2u);
  EXPECT_EQ(tactics.of(1), 2u);
  EXPECT_EQ(tactics.of(2), 0u);
  EXPECT_EQ(tactics.of(4), 0u);
  EXPECT_EQ(tactics.of(64), 1u);
  EXPECT_EQ(tactics.of(65), std::nullopt) << "the table's default applies";
  EXPECT_EQ(DeviceTactics().of(1), std::nullopt);
}

TEST(DeviceTactics, BucketsAreDecodeStepsAndPowersOfTwo) {
  EngineConfig flags;
  flags.max_running_requests = 12;
  flags.max_prefill_tokens = 100;
  EXPECT_EQ(tactic_buckets(flags), (std::vector<int64_t>{1, 2, 4, 8, 12, 16, 32, 64, 112}));
  flags.cuda_graph_bs = {3, 6};
  EXPECT_EQ(tactic_buckets(flags), (std::vector<int64_t>{1, 2, 3, 4, 6, 8, 16, 32, 64, 112}));
  flags.speculative_algorithm = "NGRAM";
  flags.speculative_num_draft_tokens = 4;
  EXPECT_EQ(tactic_buckets(flags), (std::vector<int64_t>{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 148}));
}

TEST(ChooseDeviceTactics, TheFastestThatFitsWinsInEveryBucket) {
  const auto timer = [](size_t tactic, int64_t tokens) {
    EXPECT_TRUE(tactic != kFew || tokens <= 4) << "timed a tactic that does not fit";
    if (tactic == kFew) return tokens == 4 ? 1.0 : 5.0;
    return tactic == kDense && tokens > 4 ? 2.0 : 3.0;
  };
  const DeviceTactics tactics = choose_tactics(kOps, kSizes, kBuckets, timer, always);
  EXPECT_EQ(tactics.buckets, kBuckets);
  EXPECT_EQ(chosen(tactics), (std::vector<int>{kSorted, kSorted, kFew, kDense, kDense}));
}

TEST(ChooseDeviceTactics, AWrongTacticNeverWinsHoweverFast) {
  const auto timer = [](size_t tactic, int64_t) { return tactic == kDense ? -1.0 : 1.0; };
  EXPECT_EQ(chosen(choose_tactics(kOps, kSizes, kBuckets, timer, always)),
            (std::vector<int>{kFew, kFew, kSorted, kSorted, kSorted}));
}

TEST(ChooseDeviceTactics, WithoutTimeOrAGainTheRuleStays) {
  const std::vector<int> rule = {kFew, kFew, kSorted, kSorted, kSorted};
  const auto even = [](size_t tactic, int64_t) { return tactic == kDense ? 0.98 : 1.0; };
  EXPECT_EQ(chosen(choose_tactics(kOps, kSizes, kBuckets, even, always)), rule);
  const auto dense = [](size_t tactic, int64_t) { return tactic == kDense ? 0.1 : 1.0; };
  EXPECT_EQ(chosen(choose_tactics(kOps, kSizes, kBuckets, dense, [] { return false; })), rule);
  int left = 9;  // enough for the first bucket's three rounds
  EXPECT_EQ(chosen(choose_tactics(kOps, kSizes, kBuckets, dense, [&] { return left-- > 0; })),
            (std::vector<int>{kDense, kFew, kSorted, kSorted, kSorted}));
}

TEST(ChooseDeviceTactics, WhatHasNoRivalIsNotTimed) {
  const DeviceMoeOps one = {.name = "stand-in",
                            .tactics = std::span(kTable).first(1),
                            .default_tactic = [](const DeviceMoeArgs&) { return size_t{0}; }};
  const auto timer = [](size_t, int64_t) {
    ADD_FAILURE() << "a tactic was timed";
    return 1.0;
  };
  EXPECT_EQ(chosen(choose_tactics(one, kSizes, {1, 2}, timer, always)), (std::vector<int>{0, 0}));
}

TEST(DeviceTacticsText, JoinsBucketsOfOneTactic) {
  EXPECT_EQ(tactics_text(kOps, {kBuckets, {1, 1, 0, 2, 2}}),
            "few up to 2 tokens, sorted up to 4, dense up to 1024");
}

TEST(DeviceTacticsCache, GivesBackWhatWasWritten) {
  const TempFolder folder;
  const DeviceTactics written{{1, 2, 8}, {1, 0, 2}};
  DeviceTactics read{{1, 2, 8}, {}};
  EXPECT_FALSE(*read_tactics(folder.file("tactics.json"), "gpu", 3, read));
  ASSERT_TRUE(write_tactics(folder.file("tactics.json"), "gpu", written).ok());
  ASSERT_TRUE(write_tactics(folder.file("tactics.json"), "cpu", Tactics()).ok());
  EXPECT_TRUE(*read_tactics(folder.file("tactics.json"), "gpu", 3, read));
  EXPECT_EQ(read, written);
}

TEST(DeviceTacticsCache, ABrokenEntryIsAnError) {
  for (const char* entry : {"[]", "[[1,2,8]]", "[[1,2,8],[0,0]]", "[[1,2,4],[0,0,0]]", "[[1,2,8],[0,0,3]]",
                            "[[1,2,8],[0,-1,0]]", "{}", "[[1,2,8],\"few\"]"}) {
    const TempFolder folder;
    std::ofstream(folder.file("tactics.json")) << "{\"gpu\": " << entry << "}";
    DeviceTactics read{{1, 2, 8}, {}};
    EXPECT_EQ(read_tactics(folder.file("tactics.json"), "gpu", 3, read).status().code(),
              StatusCode::kDataLoss)
        << entry;
    EXPECT_TRUE(read.chosen.empty());
  }
}

}  // namespace
}  // namespace fp4moe
