// The draft ids that a fake executor keeps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/ranks/executor.h"

namespace fp4moe {

// Ids of the last two calls of begin(), by the numbers of Executor::begin_drafts().
class FakeKeptDrafts {
 public:
  int32_t begin() {
    half_ ^= 1;
    ids_[half_].clear();
    is_sampled_[half_] = false;
    return Executor::kFirstDraft + static_cast<int32_t>(half_) * kSpan;
  }
  void add(int32_t id, const std::vector<int32_t>& masked_ids) {
    ids_[half_].push_back(std::ranges::find(masked_ids, id) == masked_ids.end() ? id : -1);
  }
  int64_t num_ids() const { return std::ssize(ids_[half_]); }
  int32_t id(int32_t number) const { return ids_[half_of(number)].at(static_cast<size_t>(place(number))); }
  // Whether a step has been sampled since the begin() before `number`.
  bool is_sampled(int32_t number) const { return is_sampled_[half_of(number)]; }
  void note_sampling() { is_sampled_[0] = is_sampled_[1] = true; }

 private:
  static constexpr int32_t kSpan = 1000;
  static int32_t place(int32_t number) { return (number - Executor::kFirstDraft) % kSpan; }
  static size_t half_of(int32_t number) {
    return static_cast<size_t>((number - Executor::kFirstDraft) / kSpan);
  }

  std::vector<int32_t> ids_[2];
  bool is_sampled_[2] = {};
  size_t half_ = 0;
};

}  // namespace fp4moe
