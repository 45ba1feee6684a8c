#include "engine/step/drafter.h"

#include <algorithm>

#include "engine/ranks/executor.h"

namespace fp4moe {
namespace {

constexpr int32_t kFirstDraft = Executor::kFirstDraft;

}  // namespace

void reveal_drafts(SequenceDraft& draft, std::span<const int32_t> ids) {
  for (size_t i = 0; i < draft.ids.size(); ++i) {
    int32_t& id = draft.ids[i];
    if (id < 0) id = ids[static_cast<size_t>(~id - kFirstDraft)];
    if (id >= 0) continue;
    draft.ids.resize(i);
    // The last of them has not been a chained row's token.
    draft.num_chained = std::min(draft.num_chained, std::max<int64_t>(0, std::ssize(draft.ids) - 1));
    return;
  }
}

int64_t num_kept_ids(const SequenceDraft& draft) {
  int64_t count = 0;
  for (const int32_t id : draft.ids)
    if (id < 0) count = std::max<int64_t>(count, ~id - kFirstDraft + 1);
  return count;
}

}  // namespace fp4moe
