// A step loop whose drafts a fake draft model chooses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/test_loop.h"

namespace fp4moe {

inline constexpr int64_t kDrafts = 3;

// The most probable token depends on the whole history, and is one of 16 that the tokenizer has.
inline void hashed_choice(std::span<const int32_t> history, std::span<float> logits) {
  hashed_logits(history, logits);
  const auto best = static_cast<size_t>((logits[0] + 4) * 2);
  for (float& x : logits) x /= 8;
  logits[best % logits.size()] += 8;
}

struct Way {
  bool takes_features = false;  // the draft model, or tokens alone
  bool are_kept = false;        // the drafts stay on an executor that samples
  int64_t most_ahead = 0;       // rows of a step that are extended before its tokens are known
  bool are_accepted = false;    // on the executor, so that steps with drafts stay in flight
};

class Drafting {
 public:
  Drafting(FakeLogits target, FakeLogits draft, LoopShape shape, Way way = {}, int64_t draft_vocab = kVocab,
           std::function<void(const Batch&)> before_forward = {})
      : tokens_(fake_config(draft_vocab), draft),
        features_(fake_config(draft_vocab), draft, static_cast<size_t>(shape.num_groups)) {
    if (way.are_kept) shape.samples = shape.keeps_draft_ids = true;
    shape.num_cheap_draft_rows = way.most_ahead;
    shape.accepts_drafts = way.are_accepted;
    features_.runs_ahead = way.most_ahead > 0;
    shape.draft.model = way.takes_features ? static_cast<Model*>(&features_) : &tokens_;
    if (shape.max_model_drafts == 0) shape.max_model_drafts = kDrafts;
    loop_ = std::make_unique<TestLoop>(std::move(target), shape, std::move(before_forward));
  }
  TestLoop& operator*() { return *loop_; }
  TestLoop* operator->() { return loop_.get(); }
  FakeFeatureDraft& features() { return features_; }

 private:
  FakeModel tokens_;
  FakeFeatureDraft features_;
  std::unique_ptr<TestLoop> loop_;
};

inline void expect_equal(const Answer& actual, const Answer& expected, const std::string& what) {
  EXPECT_EQ(actual.token_ids, expected.token_ids) << what;
  EXPECT_EQ(actual.text, expected.text) << what;
  EXPECT_EQ(actual.reason(), expected.reason()) << what;
  EXPECT_EQ(actual.last.completion_tokens, expected.last.completion_tokens) << what;
  EXPECT_EQ(actual.last.matched_stop, expected.last.matched_stop) << what;
  EXPECT_EQ(actual.last.matched_stop_token, expected.last.matched_stop_token) << what;
  ASSERT_EQ(actual.logprobs.size(), expected.logprobs.size()) << what;
  for (size_t i = 0; i < expected.logprobs.size(); ++i)
    EXPECT_EQ(actual.logprobs[i].chosen.logprob, expected.logprobs[i].chosen.logprob) << what << ", " << i;
}

inline SamplingParams endless(int64_t num_tokens) {
  return {.temperature = 0, .max_new_tokens = num_tokens, .ignore_eos = true};
}

inline std::vector<int32_t> numbers(int32_t first, int64_t count) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(first + static_cast<int32_t>(i));
  return ids;
}

}  // namespace fp4moe
