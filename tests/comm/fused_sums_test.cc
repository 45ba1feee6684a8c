// Sums over the ranks that the kernels before and after them send and take, against separate launches, bit
// for bit. If the machine has fewer GPUs than ranks, several ranks share a GPU: then the kernels are so small
// that those of all ranks fit on it at once.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/fused_rank.h"
#include "device/graph.h"

namespace fp4moe {
namespace {

class FusedSums : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FusedSums, testing::Values(1, 2, 3, 4));

TEST_P(FusedSums, HaveTheBitsOfSeparateKernels) {
  for (const int64_t hidden : {96, 2880, 7168}) {
    TestGroup group(GetParam(), fused_region(hidden));
    for (const bool fp8 : {false, true})
      for (int64_t tokens = 1; tokens <= kMaxSentRows; ++tokens) {
        if (fp8 && tokens == 3) continue;
        const FusedRanks ranks = fused_ranks(group, {tokens, hidden, fp8}, linear_producer);
        for (const Next next : {Next::kLinear, Next::kRouter}) {
          for (const bool fused : {true, false}) enqueue(group, ranks, next, fused);
          group.expect_ok();
          for (const auto& rank : ranks)
            rank->expect_same_bits(std::to_string(tokens) + " x " + std::to_string(hidden) +
                                   (next == Next::kLinear ? ", linear" : ", router") + (fp8 ? ", FP8" : ""));
        }
      }
  }
}

// Fused sums of several sizes follow each other and other operations without a wait in between, so that ranks
// are up to two operations apart and all buffers are in use.
TEST_P(FusedSums, ManyInARow) {
  TestGroup group(GetParam(), fused_region(7168));
  const FusedShape shapes[] = {{1, 2880}, {4, 7168}, {2, 96}, {3, 2880, true}};
  std::vector<FusedRanks> all;
  for (const FusedShape& shape : shapes) all.push_back(fused_ranks(group, shape, linear_producer));
  const auto shape_of = [](size_t i) { return (i + i / 5) % 4; };
  const auto next_of = [](size_t i) { return i / 4 % 2 == 0 ? Next::kRouter : Next::kLinear; };
  constexpr size_t kSums = 100;
  for (size_t i = 0; i < kSums; ++i) {
    enqueue(group, all[shape_of(i)], next_of(i), /*fused=*/true);
    if (i % 7 == 0) enqueue(group, all[shape_of(i)], next_of(i), /*fused=*/false);
  }
  for (size_t i = 0; i < kSums; ++i)
    if (i % 7 != 0) enqueue(group, all[shape_of(i)], next_of(i), /*fused=*/false);
  for (const bool fused : {true, false})
    for (const FusedRanks& ranks : all)
      for (const Next next : {Next::kRouter, Next::kLinear}) enqueue(group, ranks, next, fused);
  group.expect_ok();
  for (size_t k = 0; k < all.size(); ++k)
    for (const auto& rank : all[k]) rank->expect_same_bits("shape " + std::to_string(k));
}

TEST_P(FusedSums, GraphsReplayThem) {
  TestGroup group(GetParam(), fused_region(2880));
  const FusedRanks ranks = fused_ranks(group, {2, 2880}, linear_producer);
  std::vector<Graph> graphs;
  group.for_each([&](int r, DeviceCommunicator& communicator) {
    graphs.push_back(Graph::capture(group.ranks[static_cast<size_t>(r)]->stream, [&]() -> Status {
                       for (const Next next : {Next::kRouter, Next::kLinear})
                         ranks[static_cast<size_t>(r)]->run_fused(communicator, {"fused", 1}, next);
                       return {};
                     }).value());
  });
  constexpr int kReplays = 25;
  group.replay(graphs, kReplays);
  for (int i = 0; i < kReplays; ++i)
    for (const Next next : {Next::kRouter, Next::kLinear}) enqueue(group, ranks, next, /*fused=*/false);
  group.expect_ok();
  for (const auto& rank : ranks) rank->expect_same_bits("replays");
}

// One rank skips a sum: the other ranks name it within the deadline, and later operations do nothing.
TEST_P(FusedSums, AMissingRankFailsTheGroupInTime) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank has no peer";
  for (const Next next : {Next::kRouter, Next::kLinear}) {
    TestGroup group(GetParam(), fused_region(2880), std::chrono::milliseconds(300));
    const FusedRanks ranks = fused_ranks(group, {2, 2880}, linear_producer);
    enqueue(group, ranks, next, /*fused=*/true);
    group.expect_ok();
    const int missing = group.size() - 1;
    const auto start = std::chrono::steady_clock::now();
    enqueue(group, ranks, next, /*fused=*/true, missing);
    for (int more = 0; more < 20; ++more) enqueue(group, ranks, next, /*fused=*/more % 3 != 0, missing);
    group.synchronize();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    group.expect_deadline_naming("for rank " + std::to_string(missing) +
                                 " in attention_out, layer 3, epoch 2");
    // The group has failed, so a new sum returns at once, also on the rank that was missing.
    const auto again = std::chrono::steady_clock::now();
    enqueue(group, ranks, next, /*fused=*/true);
    group.synchronize();
    EXPECT_LT(std::chrono::steady_clock::now() - again, std::chrono::milliseconds(200));
  }
}

// In a rehearsal each rank is alone; afterwards the group starts anew, whatever the buffers contain.
TEST_P(FusedSums, FollowARehearsal) {
  TestGroup group(GetParam(), fused_region(2880));
  const FusedRanks rehearsed = fused_ranks(group, {1, 2880}, linear_producer);
  group.for_each([](int, DeviceCommunicator& communicator) { communicator.rehearse(true); });
  for (int i = 0; i < 5; ++i)
    for (const bool fused : {true, false}) enqueue(group, rehearsed, Next::kRouter, fused);
  group.expect_ok();
  for (const auto& rank : rehearsed) rank->expect_same_bits("a rehearsal");
  group.for_each([](int, DeviceCommunicator& communicator) { communicator.rehearse(false); });
  group.synchronize();
  const FusedRanks ranks = fused_ranks(group, {1, 2880}, linear_producer);
  for (int i = 0; i < 5; ++i)
    for (const bool fused : {true, false}) enqueue(group, ranks, Next::kLinear, fused);
  group.expect_ok();
  for (const auto& rank : ranks) rank->expect_same_bits("after a rehearsal");
}

TEST_P(FusedSums, AreOfferedForFewRowsOfRanksWithAGpuEach) {
  const bool alone = ranks_per_gpu() == 1;
  TestGroup group(GetParam(), fused_region(2880));
  group.for_each([&](int, DeviceCommunicator& rank) {
    EXPECT_EQ(rank.sends_sums(1, 2880), alone);
    EXPECT_EQ(rank.sends_sums(kMaxSentRows, 2880), alone);
    EXPECT_FALSE(rank.sends_sums(0, 2880));
    EXPECT_FALSE(rank.sends_sums(kMaxSentRows + 1, 64));
    EXPECT_FALSE(rank.sends_sums(kMaxSentRows, 2888));  // more than the region has room for
    rank.send_bf16_partials();
    EXPECT_FALSE(rank.sends_sums(1, 2880));
  });
  TestGroup without(GetParam());
  without.for_each([](int, DeviceCommunicator& rank) { EXPECT_FALSE(rank.sends_sums(1, 64)); });
}

}  // namespace
}  // namespace fp4moe
