// SyntheticDrafts: drafts for bench latency that are right with a given probability, so that the cost of
// verification can be measured without a drafter and with random weights.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "fp4moe/sinks.h"

namespace fp4moe {

// A prompt runs once without drafts; each later run drafts from the output of the run before. On a GPU the
// first run with drafts can differ from the one without, because its steps have more rows; runs after it have
// the same steps. Callable from any thread; must outlive the engine that drafts from it.
class SyntheticDrafts {
 public:
  // acceptance: the probability that a draft is right, given that the draft before it is.
  explicit SyntheticDrafts(double acceptance) : acceptance_(acceptance) {}

  // Sets the number of tokens of all prompts from now on, and forgets the outputs.
  void start_case(int64_t num_prompt_tokens);
  void record(std::span<const int32_t> prompt, std::vector<int32_t> output);
  // Draws anew which drafts are right.
  void start_run() {
    const std::lock_guard lock(mutex_);
    ++run_;
  }
  // Whether a known prompt's draft is right depends only on the run, the prompt and the position.
  std::vector<int32_t> draft(std::span<const int32_t> token_ids, int64_t max_tokens) const;
  DraftSource source() const {
    return [this](std::span<const int32_t> token_ids, int64_t max_tokens) {
      return draft(token_ids, max_tokens);
    };
  }

 private:
  bool is_right(uint64_t prompt, int64_t index) const;

  const double acceptance_;
  mutable std::mutex mutex_;
  size_t num_prompt_tokens_ = 0;
  uint64_t run_ = 0;
  std::map<uint64_t, std::vector<int32_t>> outputs_;  // by the hash of the prompt
};

}  // namespace fp4moe
