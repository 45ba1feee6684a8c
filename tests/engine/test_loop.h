// A step loop over a fake model, and a collector of its outputs.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>

#include "engine/fake_executor.h"
#include "engine/fake_tokenizer.h"
#include "engine/step/step_loop.h"

namespace fp4moe {

inline constexpr int64_t kVocab = 300;  // more ids than the tokenizer has tokens

struct Answer {
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<PositionLogprobs> logprobs, prompt_logprobs;
  Delta last;  // the final delta
  FinishReason reason() const { return last.finish_reason; }
};

// Collects one request's deltas.
class Collector {
 public:
  DeltaCallback callback() {
    return [state = state_](const Delta& delta) {
      EXPECT_EQ(state->answer.reason(), FinishReason::kNone) << "a delta arrived after the final one";
      state->answer.text += delta.text;
      for (const int32_t id : delta.token_ids) state->answer.token_ids.push_back(id);
      for (const auto& logprobs : delta.logprobs) state->answer.logprobs.push_back(logprobs);
      EXPECT_TRUE(delta.prompt_logprobs.empty() || state->answer.token_ids.empty())
          << "prompt scores arrived after a token";
      for (const auto& logprobs : delta.prompt_logprobs) state->answer.prompt_logprobs.push_back(logprobs);
      EXPECT_EQ(delta.completion_tokens, static_cast<int64_t>(state->answer.token_ids.size()));
      state->answer.last = delta;
      ++state->num_deltas;
      if (delta.finish_reason != FinishReason::kNone) state->done.set_value();
    };
  }
  const Answer& wait() {
    const bool is_done = state_->future.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
    EXPECT_TRUE(is_done) << "the request did not end";
    return state_->answer;
  }
  int num_deltas() const { return state_->num_deltas; }

 private:
  struct State {
    Answer answer;
    std::atomic<int> num_deltas = 0;
    std::promise<void> done;
    std::future<void> future = done.get_future();
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// A step loop over a fake model, with everything it borrows.
class TestLoop {
 public:
  explicit TestLoop(FakeLogits logits = hashed_logits, const LoopShape& shape = {},
                    std::function<void(const Batch&)> before_forward = {})
      : tokenizer_(fake_tokenizer({"<a>", "<b>"})),
        model_(fake_config(kVocab, shape.eos_token_ids, shape.window, shape.num_slots > 0),
               std::move(logits)),
        executor_(model_, shape) {
    model_.before_forward = std::move(before_forward);
    SchedulerLimits limits = shape.scheduler;
    limits.reuses_prefixes = shape.reuses_prefixes;
    limits.conservativeness = shape.conservativeness;
    const StepLoopOptions options{.scheduler = limits,
                                  .context_length = shape.context_length,
                                  .max_queued_requests = shape.max_queued_requests,
                                  .random_seed = 1,
                                  .masks = shape.masks,
                                  .drafts = shape.drafts,
                                  .draft_source = shape.draft_source,
                                  .synthetic_acceptance = shape.synthetic_acceptance,
                                  .max_model_drafts = shape.max_model_drafts,
                                  .adaptive = shape.adaptive,
                                  .time_limits = shape.time_limits,
                                  .priorities = shape.priorities,
                                  .watchdog_timeout = shape.watchdog_timeout,
                                  .hello = shape.hello};
    auto loop = StepLoop::make(executor_, tokenizer_, options, shape.grammars ? shape.grammars() : nullptr);
    EXPECT_TRUE(loop.ok()) << loop.status().to_string();
    loop_ = std::move(*loop);
  }
  StepLoop* operator->() { return loop_.get(); }
  StepLoop& operator*() { return *loop_; }

  Answer run(std::vector<int32_t> prompt, const SamplingParams& sampling) {
    return run(Request{"", std::move(prompt), sampling});
  }
  Answer run(Request request) {
    Collector collector;
    const auto id = loop_->submit(std::move(request), collector.callback());
    EXPECT_TRUE(id.ok()) << id.status().to_string();
    return id.ok() ? collector.wait() : Answer{};
  }
  // Waits until nothing runs and checks that all pages are free or cached.
  EngineStats finish() {
    loop_->drain(60);
    const EngineStats stats = loop_->stats();
    EXPECT_EQ(stats.num_used_tokens, 0);
    EXPECT_EQ(stats.num_used_pages, 0);
    EXPECT_EQ(stats.num_leaked_pages, 0);
    EXPECT_EQ(stats.num_free_pages + stats.num_cached_pages, stats.num_pages);
    EXPECT_EQ(stats.num_used_state_slots, 0);
    EXPECT_EQ(stats.num_used_window_pages, 0);
    EXPECT_EQ(stats.num_free_window_pages + stats.num_cached_window_pages, stats.num_window_pages);
    EXPECT_EQ(stats.num_running_reqs, 0);
    EXPECT_EQ(stats.num_queue_reqs, 0);
    return stats;
  }
  void destroy() { loop_.reset(); }
  FakeExecutor& executor() { return executor_; }

 private:
  Tokenizer tokenizer_;
  FakeModel model_;
  FakeExecutor executor_;
  std::unique_ptr<StepLoop> loop_;
};

inline SamplingParams greedy(int64_t max_new_tokens) {
  return {.temperature = 0, .max_new_tokens = max_new_tokens};
}

// The fake model's greedy output from its own function, without pages, batches or chunks.
inline std::vector<int32_t> expected_greedy(std::vector<int32_t> history, int64_t num_tokens,
                                            const FakeLogits& model = hashed_logits) {
  std::vector<float> logits(kVocab);
  std::vector<int32_t> answer;
  for (int64_t i = 0; i < num_tokens; ++i) {
    model(history, logits);
    const auto end = logits.begin() + kFirstWordId + 2;  // ids from here on have no token
    answer.push_back(static_cast<int32_t>(std::max_element(logits.begin(), end) - logits.begin()));
    history.push_back(answer.back());
  }
  return answer;
}

// A model that outputs `ids` after a prompt of one token.
inline FakeLogits says(std::vector<int32_t> ids) {
  return certain_logits([ids = std::move(ids)](std::span<const int32_t> history) {
    return history.size() <= ids.size() ? ids[history.size() - 1] : kEosId;
  });
}
inline FakeLogits says(std::string_view text) { return says(byte_ids(text)); }

// Holds the engine's thread inside execute_step() until opened, from the batch after the first num_passed on.
class Gate {
 public:
  std::function<void(const Batch&)> hook(int num_passed = 0) {
    return [this, left = std::make_shared<int>(num_passed)](const Batch&) {
      if ((*left)-- > 0) return;
      arrived_.store(true);
      arrived_.notify_all();
      open_.wait(false);
    };
  }
  void wait_until_reached() { arrived_.wait(false); }
  void open() {
    open_.store(true);
    open_.notify_all();
  }

 private:
  std::atomic<bool> arrived_ = false, open_ = false;
};

}  // namespace fp4moe
