// The inbox without a loop; the test's thread acts as the loop's thread.
#include "engine/step/inbox.h"

#include <gtest/gtest.h>

#include <future>

#include "engine/test_loop.h"
#include "engine/test_sequence.h"

namespace fp4moe {
namespace {

class InboxTest : public testing::Test {
 protected:
  Result<std::string> submit(const std::string& id, DeltaCallback on_delta = {}) {
    GrammarTicket ticket;
    return inbox_.submit({.id = id}, ticket, [&](Request request, uint64_t) {
      auto made = sequence(request.id, 3, 4);
      made->output.sink = std::make_shared<DeltaSink>(std::move(on_delta));
      return made;
    });
  }
  LoopInput take() { return inbox_.wait(/*can_step=*/true, /*has_requests=*/true); }

  FakeModel model_{fake_config(kVocab, {kEosId}), hashed_logits};
  FakeExecutor executor_{model_, {}};
  Inbox inbox_{executor_, /*max_queued_requests=*/3};
};

TEST_F(InboxTest, NamesRequestsAndRefusesIdsInUse) {
  EXPECT_EQ(submit("").value(), "req-0");
  EXPECT_EQ(submit("a").value(), "a");
  EXPECT_EQ(submit("a").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(take().sequences.size(), 2u);
  EXPECT_TRUE(take().sequences.empty()) << "a request was taken twice";
  EXPECT_EQ(submit("a").status().code(), StatusCode::kInvalidArgument)
      << "the id is in use until the request ends";
  inbox_.release_id("a");
  EXPECT_TRUE(submit("a").ok());
}

TEST_F(InboxTest, TheQueueIsFullUntilThePublishedQueueIsShorter) {
  for (const char* id : {"a", "b", "c"}) EXPECT_TRUE(submit(id).ok());
  EXPECT_EQ(submit("d").status().code(), StatusCode::kUnavailable);
  inbox_.publish({});
  EXPECT_EQ(inbox_.stats().num_queue_reqs, 3) << "requests that the loop has not taken must count";
  take();
  inbox_.publish({.num_queue_reqs = 1});
  EXPECT_TRUE(submit("d").ok());
  EXPECT_EQ(inbox_.stats().num_queue_reqs, 2);
}

TEST_F(InboxTest, ACancelDoesNotHitTheNextOwnerOfItsId) {
  EXPECT_TRUE(submit("a").ok());
  inbox_.cancel("a");
  inbox_.cancel("b");  // not active
  inbox_.release_id("a");
  EXPECT_TRUE(submit("a").ok());
  EXPECT_TRUE(take().cancelled_ids.empty());
  inbox_.cancel("a");
  EXPECT_EQ(take().cancelled_ids, std::vector<std::string>{"a"});
}

TEST_F(InboxTest, AFlushEndsWhenItIsPublished) {
  auto flushed = std::async(std::launch::async, [&] { return inbox_.flush_cache(); });
  EXPECT_TRUE(inbox_.wait(/*can_step=*/false, /*has_requests=*/false).flushes);
  EXPECT_EQ(flushed.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  inbox_.publish({});
  EXPECT_TRUE(flushed.get().ok());
  EXPECT_FALSE(take().flushes);
  EXPECT_TRUE(submit("a").ok());
  EXPECT_EQ(inbox_.flush_cache().code(), StatusCode::kUnavailable);
}

TEST_F(InboxTest, StopAbortsAndRefusesForGood) {
  inbox_.stop();
  for (int i = 0; i < 2; ++i) {
    const LoopInput input = take();
    EXPECT_TRUE(input.aborts && input.stops);
  }
  EXPECT_EQ(submit("a").status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(inbox_.flush_cache().ok()) << "a flush must not wait for a loop that has ended";
}

TEST_F(InboxTest, AbandonEndsActiveRequestsAndDrain) {
  Delta last;
  EXPECT_TRUE(submit("a", [&](const Delta& delta) { last = delta; }).ok());
  inbox_.abandon(internal_error("stuck"));
  EXPECT_EQ(last.finish_reason, FinishReason::kError);
  EXPECT_EQ(last.error, "stuck");
  EXPECT_EQ(inbox_.failure().message(), "stuck");
  inbox_.drain(60);
}

TEST_F(InboxTest, TheHitRateIsThatOfThePromptsPrefilledLast) {
  inbox_.publish({.prompt_tokens_total = 10, .cached_tokens_total = 5});
  EXPECT_EQ(inbox_.stats().cache_hit_rate, 0.5);
  inbox_.publish({.prompt_tokens_total = 10, .cached_tokens_total = 5});
  EXPECT_EQ(inbox_.stats().cache_hit_rate, 0.5) << "the rate must not change without a new prompt";
  inbox_.publish({.prompt_tokens_total = 20, .cached_tokens_total = 5});
  EXPECT_EQ(inbox_.stats().cache_hit_rate, 0);
}

TEST_F(InboxTest, ARebalanceWaitsForTheLoop) {
  auto moves = std::async(std::launch::async, [&] { return inbox_.rebalance_experts(); });
  EXPECT_TRUE(inbox_.wait(/*can_step=*/false, /*has_requests=*/false).rebalances);
  EXPECT_EQ(moves.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  inbox_.end_rebalance(ExpertMoves{.num_experts = 7});
  EXPECT_EQ(moves.get()->num_experts, 7);
  EXPECT_FALSE(take().rebalances);
  auto refused = std::async(std::launch::async, [&] { return inbox_.rebalance_experts(); });
  EXPECT_TRUE(inbox_.wait(/*can_step=*/false, /*has_requests=*/false).rebalances);
  inbox_.end_rebalance(unsupported("no"));
  EXPECT_EQ(refused.get().status().message(), "no");
  auto stuck = std::async(std::launch::async, [&] { return inbox_.rebalance_experts(); });
  EXPECT_TRUE(inbox_.wait(/*can_step=*/false, /*has_requests=*/false).rebalances);
  inbox_.abandon(internal_error("stuck"));
  EXPECT_EQ(stuck.get().status().message(), "stuck");
}

}  // namespace
}  // namespace fp4moe
