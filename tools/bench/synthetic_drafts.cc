#include "bench/synthetic_drafts.h"

#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "engine/output/sampler.h"

namespace fp4moe {
namespace {

uint64_t hash_of(std::span<const int32_t> ids) {
  return hash64(ids.data(), static_cast<int64_t>(ids.size_bytes()));
}

}  // namespace

void SyntheticDrafts::start_case(int64_t num_prompt_tokens) {
  const std::lock_guard lock(mutex_);
  num_prompt_tokens_ = static_cast<size_t>(num_prompt_tokens);
  outputs_.clear();
}

void SyntheticDrafts::record(std::span<const int32_t> prompt, std::vector<int32_t> output) {
  const std::lock_guard lock(mutex_);
  outputs_[hash_of(prompt)] = std::move(output);
}

bool SyntheticDrafts::is_right(uint64_t prompt, int64_t index) const {
  return token_random(prompt + run_, index) < acceptance_;
}

std::vector<int32_t> SyntheticDrafts::draft(std::span<const int32_t> token_ids, int64_t max_tokens) const {
  const std::lock_guard lock(mutex_);
  if (token_ids.size() < num_prompt_tokens_) return {};
  const uint64_t prompt = hash_of(token_ids.first(num_prompt_tokens_));
  const auto known = outputs_.find(prompt);
  if (known == outputs_.end()) return {};
  const std::vector<int32_t>& output = known->second;
  const auto first = std::ssize(token_ids) - static_cast<int64_t>(num_prompt_tokens_);
  std::vector<int32_t> ids;
  for (int64_t i = first; i < std::min(first + max_tokens, std::ssize(output)); ++i) {
    const int32_t right = output[static_cast<size_t>(i)];
    ids.push_back(is_right(prompt, i) ? right : right == 0 ? 1 : right - 1);
  }
  return ids;
}

}  // namespace fp4moe
