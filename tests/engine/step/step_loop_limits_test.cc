// The step loop's time limits for requests, and its watchdog.
#include <gtest/gtest.h>

#include <thread>

#include "base/log.h"
#include "engine/test_loop.h"

namespace fp4moe {
namespace {

SamplingParams endless() {
  SamplingParams sampling = greedy(1000);
  sampling.ignore_eos = true;
  return sampling;
}

std::function<void(const Batch&)> slow_steps() {
  return [](const Batch&) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
}

TEST(StepLoopLimits, ARequestEndsWithItsOwnTimeout) {
  TestLoop loop(hashed_logits, {.num_pages = 2000, .context_length = 8000}, slow_steps());
  Collector late, other;
  ASSERT_TRUE(loop->submit({"", {1}, endless(), {}, 0.1}, late.callback()).ok());
  ASSERT_TRUE(loop->submit({"", {2}, greedy(3)}, other.callback()).ok());
  const Delta& last = late.wait().last;
  EXPECT_EQ(last.finish_reason, FinishReason::kError);
  EXPECT_EQ(last.error_code, StatusCode::kDeadline);
  EXPECT_NE(last.error.find("timeout of 0.1 s"), std::string::npos) << last.error;
  EXPECT_NE(other.wait().reason(), FinishReason::kError);
  const EngineStats stats = loop.finish();
  EXPECT_EQ(stats.num_timed_out_requests_total, 1);
  EXPECT_EQ(stats.num_failed_requests_total, 1);
  EXPECT_EQ(loop->submit({"", {1}, endless(), {}, -1.0}, [](const Delta&) {}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(StepLoopLimits, WhatWaitsTooLongIsUnavailableAndWhatRunsTooLongIsLate) {
  TestLoop loop(hashed_logits,
                {.num_pages = 2000,
                 .scheduler = {.max_running_requests = 1, .chunked_prefill_size = 8, .max_prefill_tokens = 8},
                 .context_length = 8000,
                 .time_limits = {.waiting = 0.1, .running = 0.4}},
                slow_steps());
  Collector running, waiting;
  ASSERT_TRUE(loop->submit({"", {1}, endless()}, running.callback()).ok());
  ASSERT_TRUE(loop->submit({"", {2}, endless()}, waiting.callback()).ok());
  EXPECT_EQ(waiting.wait().last.error_code, StatusCode::kUnavailable);
  EXPECT_NE(waiting.wait().last.error.find("--req-waiting-timeout 0.1 s"), std::string::npos);
  EXPECT_EQ(running.wait().last.error_code, StatusCode::kDeadline);
  EXPECT_NE(running.wait().last.error.find("--req-running-timeout 0.4 s"), std::string::npos);
  EXPECT_GT(running.wait().token_ids.size(), 0u);
  EXPECT_EQ(loop.finish().num_timed_out_requests_total, 2);
}

// Captures every error line that the process logs during its lifetime.
class LogCapture {
 public:
  LogCapture() {
    set_log_sink([this](LogLevel level, const std::string& line) {
      std::lock_guard lock(mutex_);
      if (level == LogLevel::kError) errors_ += line + "\n";
    });
  }
  ~LogCapture() { set_log_sink({}); }
  std::string errors() const {
    std::lock_guard lock(mutex_);
    return errors_;
  }

 private:
  mutable std::mutex mutex_;
  std::string errors_;
};

TEST(StepLoopLimits, TheWatchdogNamesTheStuckStepAndAnswersForIt) {
  LogCapture log;
  Gate gate;
  TestLoop loop(hashed_logits, {.watchdog_timeout = 0.2}, gate.hook());
  Collector stuck, queued;
  ASSERT_TRUE(loop->submit({"stuck-1", {1, 2, 3}, greedy(3)}, stuck.callback()).ok());
  gate.wait_until_reached();
  ASSERT_TRUE(loop->submit({"queued-1", {1}, greedy(3)}, queued.callback()).ok());
  for (Collector* collector : {&stuck, &queued}) {
    EXPECT_EQ(collector->wait().reason(), FinishReason::kError);
    EXPECT_NE(collector->wait().last.error.find("stuck in the forward pass for 0.2 s"), std::string::npos);
  }
  EXPECT_EQ(loop->failure().code(), StatusCode::kInternal);
  EXPECT_EQ(loop->submit({"", {1}, greedy(3)}, [](const Delta&) {}).status().code(),
            StatusCode::kUnavailable);
  loop->drain(0.01);  // returns although the step does not
  const std::string errors = log.errors();
  EXPECT_NE(errors.find("step 1: 3 rows of 1 requests"), std::string::npos) << errors;
  EXPECT_NE(errors.find("request stuck-1 (group 0): prompt 3, tokens 3, computed 0, rows in the step 3"),
            std::string::npos)
      << errors;
  EXPECT_NE(errors.find("KV pages: 1 used"), std::string::npos) << errors;
  gate.open();  // the step ends after all, but nothing is delivered
  loop.destroy();
}

TEST(StepLoopLimits, ManyShortStepsAndIdlenessAreNotStuck) {
  TestLoop loop(hashed_logits, {.num_pages = 2000, .context_length = 8000, .watchdog_timeout = 0.25},
                slow_steps());
  EXPECT_EQ(loop.run({1},
                     [] {
                       SamplingParams sampling = greedy(300);
                       sampling.ignore_eos = true;
                       return sampling;
                     }())
                .token_ids.size(),
            300u);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_TRUE(loop->failure().ok());
  loop.finish();
}

}  // namespace
}  // namespace fp4moe
