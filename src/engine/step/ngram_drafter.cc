#include "engine/step/ngram_drafter.h"

#include <algorithm>

namespace fp4moe {

std::vector<int32_t> ngram_draft(std::span<const int32_t> token_ids, const NgramLimits& limits) {
  const int64_t n = std::ssize(token_ids);
  const auto at = [&](int64_t i) { return token_ids[static_cast<size_t>(i)]; };
  int64_t best = 0, best_end = 0;  // length of the longest match, and the index after it
  for (int64_t end = n - 1; end > best && best < limits.max_match; --end) {
    const int64_t most = std::min(end, limits.max_match);
    int64_t length = 0;
    while (length < most && at(end - 1 - length) == at(n - 1 - length)) ++length;
    if (length <= best) continue;
    best = length;
    best_end = end;
  }
  std::vector<int32_t> draft;
  if (best < std::max<int64_t>(limits.min_match, 1)) return draft;
  for (int64_t i = best_end; std::ssize(draft) < limits.max_tokens; ++i)
    draft.push_back(i < n ? at(i) : draft[static_cast<size_t>(i - n)]);
  return draft;
}

Status NgramDrafter::draft(DpScheduler& scheduler) {
  listed_.clear();
  scheduler.list(listed_);
  for (Sequence* sequence : listed_) {
    sequence->draft.ids.clear();
    if (may_draft(*sequence)) sequence->draft.ids = ngram_draft(sequence->token_ids, limits_);
  }
  return {};
}

}  // namespace fp4moe
