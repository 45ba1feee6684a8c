// The step loop over several data-parallel groups, and a permanent failure of its executor.
#include <gtest/gtest.h>

#include <thread>

#include "engine/test_loop.h"

namespace fp4moe {
namespace {

LoopShape shape_of(int num_groups) {
  LoopShape shape;
  shape.num_groups = num_groups;
  shape.num_pages = 48;
  return shape;
}

// The same prompts give the same outputs over 1, 2, 3 and 4 groups, whichever prompts share a group.
TEST(StepLoopGroups, AnswersDoNotDependOnTheNumberOfGroups) {
  std::vector<std::vector<int32_t>> alone;
  for (const int num_groups : {1, 2, 3, 4}) {
    TestLoop loop(hashed_logits, shape_of(num_groups));
    std::vector<Collector> crowd(14);
    for (size_t i = 0; i < crowd.size(); ++i) {
      SamplingParams sampling = i % 2 == 0 ? greedy(20) : SamplingParams{.seed = i, .max_new_tokens = 20};
      sampling.ignore_eos = true;
      ASSERT_TRUE(loop->submit({"", std::vector<int32_t>(1 + i * 5, static_cast<int32_t>(i)), sampling},
                               crowd[i].callback())
                      .ok());
    }
    for (size_t i = 0; i < crowd.size(); ++i) {
      const Answer& answer = crowd[i].wait();
      EXPECT_EQ(answer.token_ids.size(), 20u);
      if (num_groups == 1)
        alone.push_back(answer.token_ids);
      else
        EXPECT_EQ(answer.token_ids, alone[i]) << "request " << i << ", " << num_groups << " groups";
    }
    loop.finish();
  }
}

TEST(StepLoopGroups, StatsCountAllGroups) {
  TestLoop loop(hashed_logits, shape_of(3));
  EXPECT_EQ(loop->stats().max_total_num_tokens, 3 * 48 * 4);
  loop.finish();
}

// Every step has a batch for each group, even idle ones: ranks without work still take part in exchanges.
TEST(StepLoopGroups, IdleGroupsHaveEmptyBatches) {
  TestLoop loop(hashed_logits, shape_of(4));
  std::atomic<int> num_steps = 0;
  loop.executor().on_step = [&](std::span<const Batch> groups) {
    ++num_steps;
    EXPECT_FALSE(groups[0].token_ids.empty());
    for (size_t group = 1; group < 4; ++group) {
      EXPECT_TRUE(groups[group].token_ids.empty());
      EXPECT_TRUE(groups[group].sequences.empty());
      EXPECT_TRUE(groups[group].logit_rows.empty());
    }
  };
  SamplingParams sampling = greedy(5);
  sampling.ignore_eos = true;
  EXPECT_EQ(loop.run({1, 2, 3}, sampling).token_ids.size(), 5u);
  EXPECT_EQ(num_steps, 5);
  loop.finish();
}

// One group's request is cancelled in mid-prefill while other requests decode. Their outputs do not change,
// and every step still has a batch for each group.
TEST(StepLoopGroups, CancelInMidPrefillLeavesTheOthersAlone) {
  SamplingParams sampling = greedy(40);
  sampling.ignore_eos = true;
  std::vector<std::vector<int32_t>> alone;
  {
    TestLoop loop(hashed_logits, shape_of(1));
    for (int32_t i = 0; i < 3; ++i) alone.push_back(loop.run({i, 7}, sampling).token_ids);
  }
  TestLoop loop(hashed_logits, shape_of(4));
  std::atomic<bool> reached = false;
  loop.executor().on_step = [&](std::span<const Batch> groups) {
    for (const Batch& batch : groups)
      for (const SequenceRows& s : batch.sequences)
        if (s.num_rows > 2 && s.first_position > 0 && !reached.exchange(true)) loop->cancel("long");
  };
  std::vector<Collector> others(3);
  for (int32_t i = 0; i < 3; ++i)
    ASSERT_TRUE(loop->submit({"", {i, 7}, sampling}, others[static_cast<size_t>(i)].callback()).ok());
  Collector cancelled;
  ASSERT_TRUE(loop->submit({"long", std::vector<int32_t>(80, 5), sampling}, cancelled.callback()).ok());
  EXPECT_EQ(cancelled.wait().reason(), FinishReason::kAbort);
  EXPECT_TRUE(cancelled.wait().token_ids.empty());
  EXPECT_TRUE(reached);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(others[i].wait().token_ids, alone[i]);
  loop.finish();
}

// Each group runs out of pages and retracts requests separately; outputs do not change.
TEST(StepLoopGroups, RetractionIsEachGroupsOwn) {
  LoopShape shape = shape_of(2);
  shape.num_pages = 12;
  shape.context_length = 48;
  SamplingParams sampling = greedy(30);
  sampling.ignore_eos = true;
  Gate gate;
  TestLoop roomy(hashed_logits, shape_of(1)), tight(hashed_logits, shape, gate.hook());
  std::vector<Collector> crowd(10);
  for (size_t i = 0; i < crowd.size(); ++i)
    EXPECT_TRUE(tight->submit({"", {static_cast<int32_t>(i), 3, 4}, sampling}, crowd[i].callback()).ok());
  gate.open();
  for (size_t i = 0; i < crowd.size(); ++i)
    EXPECT_EQ(crowd[i].wait().token_ids, roomy.run({static_cast<int32_t>(i), 3, 4}, sampling).token_ids);
  EXPECT_GT(tight.finish().num_retracted_reqs, 0);
  roomy.finish();
}

TEST(StepLoopFailure, EndsWhatRunsAndWaitsAndRefusesTheRest) {
  LoopShape shape;
  shape.scheduler.max_running_requests = 2;
  Gate gate;
  TestLoop loop(hashed_logits, shape, gate.hook());
  const std::string reason = "rank 2: combine of layer 3 waited 10 s for rank 1";
  std::vector<Collector> crowd(5);  // three of them wait
  for (Collector& collector : crowd)
    ASSERT_TRUE(loop->submit({"", {1, 2}, greedy(100)}, collector.callback()).ok());
  EXPECT_TRUE(loop->failure().ok());
  gate.wait_until_reached();
  loop.executor().fail({StatusCode::kDeadline, reason});
  gate.open();
  for (Collector& collector : crowd) {
    EXPECT_EQ(collector.wait().reason(), FinishReason::kError);
    EXPECT_EQ(collector.wait().last.error, reason);
  }
  EXPECT_EQ(loop->failure().code(), StatusCode::kDeadline);
  const Status refused = loop->submit({"", {1}, greedy(1)}, [](const Delta&) { ADD_FAILURE(); }).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_EQ(refused.message(), "the engine has failed: " + reason);
  EXPECT_EQ(loop.finish().num_failed_requests_total, 5);
}

TEST(StepLoopFailure, IsKnownWhileNothingRuns) {
  TestLoop loop;
  loop.executor().fail({StatusCode::kDeadline, "rank 3 is gone"});
  EXPECT_EQ(loop->failure().message(), "rank 3 is gone");
  EXPECT_EQ(loop->submit({"", {1}, greedy(1)}, [](const Delta&) { ADD_FAILURE(); }).status().code(),
            StatusCode::kUnavailable);
  loop.finish();
}

}  // namespace
}  // namespace fp4moe
