// The step loop's task between requests: those before it end first, later ones wait.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>

#include "engine/conversations.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

const std::vector<int32_t> kPrompt(9, 7);

// A fake model whose weights are one number.
struct Weights {
  std::atomic<int32_t> value{0};
  FakeLogits model() {
    return [this](std::span<const int32_t> history, std::span<float> logits) {
      std::vector<int32_t> other(history.begin(), history.end());
      other.push_back(value.load());
      hashed_logits(other, logits);
    };
  }
  std::vector<int32_t> answer(int32_t with, int64_t num_tokens) {
    const int32_t now = value.exchange(with);
    std::vector<int32_t> ids = expected_greedy(kPrompt, num_tokens, model());
    value.store(now);
    return ids;
  }
};

TEST(StepLoopUpdate, RequestsBeforeItEndFirstAndLaterOnesWait) {
  Weights weights;
  Gate gate;
  const std::vector<int32_t> old = weights.answer(0, 8), updated = weights.answer(5, 8);
  ASSERT_NE(old, updated);
  TestLoop loop(weights.model(), {}, gate.hook());
  Collector first, second, third;
  ASSERT_TRUE(loop->submit({"", kPrompt, exactly(8)}, first.callback()).ok());
  gate.wait_until_reached();
  std::promise<void> may_update;
  std::atomic<bool> is_updating{false};
  auto update = std::async(std::launch::async, [&] {
    return loop->update_weights(
        [&]() -> Status {
          is_updating = true;
          may_update.get_future().wait();
          weights.value = 5;
          return {};
        },
        /*aborts=*/false);
  });
  gate.open();
  EXPECT_EQ(first.wait().token_ids, old);
  ASSERT_TRUE(eventually([&] { return is_updating.load(); }));
  EXPECT_TRUE(loop->stats().is_updating_weights);
  ASSERT_TRUE(loop->submit({"", kPrompt, exactly(8)}, second.callback()).ok());
  ASSERT_TRUE(loop->submit({"cancelled", kPrompt, exactly(8)}, third.callback()).ok());
  loop->cancel("cancelled");
  EXPECT_EQ(loop->update_weights([]() -> Status { return {}; }, false).status().code(),
            StatusCode::kUnavailable);
  may_update.set_value();
  const Result<int64_t> num_waited = update.get();
  ASSERT_TRUE(num_waited.ok()) << num_waited.status().to_string();
  EXPECT_EQ(*num_waited, 2);
  EXPECT_EQ(second.wait().token_ids, updated);
  EXPECT_EQ(second.wait().last.cached_tokens, 0) << "a page of the old weights was reused";
  EXPECT_EQ(third.wait().reason(), FinishReason::kAbort);
  EXPECT_FALSE(loop->stats().is_updating_weights);
  loop.finish();
}

TEST(StepLoopUpdate, CanAbortTheRequestsBeforeIt) {
  Gate gate;
  TestLoop loop(hashed_logits, {}, gate.hook());
  Collector running;
  ASSERT_TRUE(loop->submit({"", kPrompt, exactly(40)}, running.callback()).ok());
  gate.wait_until_reached();
  auto update = std::async(std::launch::async,
                           [&] { return loop->update_weights([]() -> Status { return {}; }, true); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  gate.open();
  EXPECT_EQ(running.wait().reason(), FinishReason::kAbort);
  EXPECT_TRUE(update.get().ok());
  loop.finish();
}

TEST(StepLoopUpdate, ARefusedUpdateChangesNothing) {
  TestLoop loop;
  loop.run(kPrompt, exactly(4));
  const auto refuse = []() -> Status { return invalid_argument("no"); };
  const Result<int64_t> refused = loop->update_weights(refuse, false);
  EXPECT_EQ(refused.status().message(), "no");
  const auto fail = []() -> Status { throw std::runtime_error("thrown"); };
  EXPECT_EQ(loop->update_weights(fail, false).status().message(), "thrown");
  EXPECT_EQ(loop.run(kPrompt, exactly(4)).last.cached_tokens, 8);
  loop.finish();
}

TEST(StepLoopUpdate, AFailureOfTheExecutorIsPermanent) {
  TestLoop loop;
  const Result<int64_t> failed = loop->update_weights(
      [&]() -> Status {
        loop.executor().fail(internal_error("rank 1: lost"));
        return internal_error("lost");
      },
      false);
  EXPECT_EQ(failed.status().message(), "rank 1: lost");
  EXPECT_EQ(loop->failure().message(), "rank 1: lost");
  EXPECT_EQ(loop->update_weights([]() -> Status { return {}; }, false).status().message(), "rank 1: lost");
  EXPECT_FALSE(loop->submit({"", kPrompt, exactly(1)}, {}).ok());
}

TEST(StepLoopUpdate, IsRefusedWhileTheEngineDrains) {
  Gate gate;
  TestLoop loop(hashed_logits, {}, gate.hook());
  Collector running;
  ASSERT_TRUE(loop->submit({"", kPrompt, exactly(4)}, running.callback()).ok());
  gate.wait_until_reached();
  bool has_run = false;
  auto update = std::async(std::launch::async, [&] {
    return loop->update_weights(
        [&]() -> Status {
          has_run = true;
          return {};
        },
        false);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  auto drained = std::async(std::launch::async, [&] { loop->drain(60); });
  EXPECT_EQ(update.get().status().code(), StatusCode::kUnavailable);
  gate.open();
  running.wait();
  drained.get();
  EXPECT_FALSE(has_run);
}

}  // namespace
}  // namespace fp4moe
