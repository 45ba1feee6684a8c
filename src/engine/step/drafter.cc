#include "engine/step/drafter.h"

#include <algorithm>

namespace fp4moe {

void KeptDrafts::add(const SequenceDraft& draft) {
  for (const int32_t id : draft.ids) {
    if (id >= 0) continue;
    first = first == end ? ~id : std::min(first, ~id);
    end = std::max(end, ~id + 1);
  }
}

void reveal_drafts(SequenceDraft& draft, int32_t first, std::span<const int32_t> ids) {
  for (size_t i = 0; i < draft.ids.size(); ++i) {
    int32_t& id = draft.ids[i];
    if (id < 0) id = ids[static_cast<size_t>(~id - first)];
    if (id >= 0) continue;
    draft.ids.resize(i);
    // The last of them has not been a chained row's token.
    draft.num_chained = std::min(draft.num_chained, std::max<int64_t>(0, std::ssize(draft.ids) - 1));
    return;
  }
}

}  // namespace fp4moe
