// The order of admission.
#include <gtest/gtest.h>

#include <mutex>

#include "engine/step/step_loop.h"
#include "engine/test_loop.h"

namespace fp4moe {
namespace {

constexpr SchedulerLimits kOneAtATime{
    .max_running_requests = 1, .chunked_prefill_size = 16, .max_prefill_tokens = 32};

// Submits the requests while one is running; returns the order in which they end.
std::vector<std::string> order_of_ends(
    const PriorityRules& rules, const std::vector<std::pair<std::string, std::optional<int64_t>>>& requests) {
  Gate gate;
  TestLoop loop(hashed_logits, {.scheduler = kOneAtATime, .priorities = rules}, gate.hook());
  std::mutex mutex;
  std::vector<std::string> order;
  const auto submit = [&](const std::string& id, std::optional<int64_t> priority) {
    SamplingParams sampling{.temperature = 0, .max_new_tokens = 2};
    const auto on_delta = [&, id](const Delta& delta) {
      std::lock_guard lock(mutex);
      if (delta.finish_reason != FinishReason::kNone) order.push_back(id);
    };
    EXPECT_TRUE(
        loop->submit({.id = id, .input_ids = {1}, .sampling = sampling, .priority = priority}, on_delta)
            .ok());
  };
  submit("running", {});
  gate.wait_until_reached();
  for (const auto& [id, priority] : requests) submit(id, priority);
  gate.open();
  loop.finish();
  return order;
}

using Order = std::vector<std::string>;

TEST(StepLoopPriority, LargerOnesFirstAndOfEqualOnesTheFirst) {
  EXPECT_EQ(
      order_of_ends({.are_used = true}, {{"none", {}}, {"a", 0}, {"b", 5}, {"c", -1}, {"d", 5}, {"e", 0}}),
      (Order{"running", "b", "d", "a", "e", "c", "none"}));
}

TEST(StepLoopPriority, SmallerOnesFirstIfAskedFor) {
  EXPECT_EQ(order_of_ends({.are_used = true, .low_first = true},
                          {{"none", {}}, {"a", 0}, {"b", 5}, {"c", -1}, {"d", -1}}),
            (Order{"running", "c", "d", "a", "b", "none"}));
}

TEST(StepLoopPriority, UnusedOnesAreIgnored) {
  EXPECT_EQ(order_of_ends({}, {{"a", 0}, {"b", 5}, {"none", {}}, {"c", 7}}),
            (Order{"running", "a", "b", "none", "c"}));
}

TEST(StepLoopPriority, UnusedOnesAreRefusedIfAskedFor) {
  TestLoop loop(hashed_logits, {.priorities = {.refuse_unused = true}});
  const auto refused = loop->submit({.input_ids = {1}, .priority = 3}, [](const Delta&) { ADD_FAILURE(); });
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(refused.status().message(),
            "priority: requests are served in order of arrival because --enable-priority-scheduling is off");
  EXPECT_EQ(loop.run({1}, {.max_new_tokens = 2}).token_ids.size(), 2u);
}

}  // namespace
}  // namespace fp4moe
