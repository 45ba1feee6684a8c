// LogitEdits: changes that a request's penalties, biases and min_new_tokens make to its logits.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "fp4moe/request.h"
#include "kernels/device_sampler.h"

namespace fp4moe {

class LogitEdits {
 public:
  LogitEdits() = default;
  // eos_ids: the model's end tokens, which end the output unless ignore_eos is set.
  LogitEdits(const SamplingParams& sampling, std::span<const int32_t> eos_ids);

  // Whether a token's edits depend on the output tokens before it.
  bool has_penalties() const { return has_penalties_; }
  // Counts an output token.
  void count(int32_t token_id);
  // Appends the edits for output token n (from 0): each id at most once.
  void append(int64_t n, std::vector<LogitEdit>& edits) const;

 private:
  struct Entry {
    int32_t token_id;
    int64_t count = 0;  // occurrences in the output
    float bias = 0;
    bool ends = false;  // the token ends the output
  };
  Entry& entry(int32_t token_id);

  double frequency_ = 0, presence_ = 0;
  float repetition_ = 1;
  int64_t min_new_tokens_ = 0;
  bool has_penalties_ = false;
  std::vector<Entry> entries_;
  std::unordered_map<int32_t, size_t> places_;  // token id -> index in entries_
};

// Upper limit on the edits in a step of num_rows rows; the sequences of all these rows together have
// num_tokens tokens, where a sequence counts once for each of its rows.
int64_t max_logit_edits(int64_t num_rows, int64_t num_tokens, int64_t num_eos_ids);

// Applies `edit` to logit x.
float edited(float x, const LogitEdit& edit);

}  // namespace fp4moe
