#include "engine/output/logit_edits.h"

#include <algorithm>
#include <limits>

#include "engine/request_check.h"

namespace fp4moe {

LogitEdits::LogitEdits(const SamplingParams& sampling, std::span<const int32_t> eos_ids)
    : frequency_(sampling.frequency_penalty),
      presence_(sampling.presence_penalty),
      repetition_(sampling.repetition_penalty),
      min_new_tokens_(sampling.min_new_tokens),
      has_penalties_(frequency_ != 0 || presence_ != 0 || repetition_ != 1) {
  for (const LogitBias& bias : sampling.logit_bias)
    if (bias.bias != 0) entry(bias.token_id).bias = bias.bias;
  if (min_new_tokens_ == 0) return;
  if (!sampling.ignore_eos)
    for (const int32_t id : eos_ids) entry(id).ends = true;
  for (const int32_t id : sampling.stop_token_ids) entry(id).ends = true;
}

LogitEdits::Entry& LogitEdits::entry(int32_t token_id) {
  const auto [place, is_new] = places_.try_emplace(token_id, entries_.size());
  if (is_new) entries_.push_back({.token_id = token_id});
  return entries_[place->second];
}

void LogitEdits::count(int32_t token_id) {
  if (has_penalties_) ++entry(token_id).count;
}

void LogitEdits::append(int64_t n, std::vector<LogitEdit>& edits) const {
  const bool may_end = n >= min_new_tokens_;
  for (const Entry& e : entries_) {
    LogitEdit edit{.token_id = e.token_id, .bias = e.bias};
    if (e.count > 0) {
      edit.add = static_cast<float>(-(frequency_ * static_cast<double>(e.count) + presence_));
      edit.scale = repetition_;
    }
    if (e.ends && !may_end) edit.add = -std::numeric_limits<float>::infinity();
    if (edit.add != 0 || edit.scale != 1 || edit.bias != 0) edits.push_back(edit);
  }
}

int64_t max_logit_edits(int64_t num_rows, int64_t num_tokens, int64_t num_eos_ids) {
  return num_tokens + num_rows * (1 + kMaxLogitBiases + kMaxStops + num_eos_ids);
}

float edited(float x, const LogitEdit& edit) {
  x += edit.add;
  x = x < 0 ? x * edit.scale : x / edit.scale;
  return std::min(x + edit.bias, std::numeric_limits<float>::max());
}

}  // namespace fp4moe
