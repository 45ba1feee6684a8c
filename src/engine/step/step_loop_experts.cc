// The step loop's part in reporting which experts a sequence's tokens were routed to.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/step/step_loop.h"

namespace fp4moe {

void StepLoop::make_room_for_experts(GroupRows& rows, std::span<const ScheduledRows> step) const {
  rows.experts.clear();
  const auto wants = [](const ScheduledRows& scheduled) { return scheduled.sequence->experts.from >= 0; };
  if (std::ranges::none_of(step, wants)) return;
  const ModelConfig& config = executor_.config();
  rows.experts.resize(rows.token_ids.size() * static_cast<size_t>(config.num_layers * config.top_k));
}

// Records each token's experts once: a retracted sequence recomputes its rows, with the same experts. The
// last layer only has the rows whose logits are computed, which include every new row.
void StepLoop::keep_experts(const GroupRows& rows, std::span<const ScheduledRows> step) const {
  if (rows.experts.empty()) return;
  const int64_t num_layers = executor_.config().num_layers, k = executor_.config().top_k;
  const int64_t num_rows = std::ssize(rows.token_ids);
  for (size_t s = 0; s < step.size(); ++s) {
    Sequence& sequence = *step[s].sequence;
    if (sequence.experts.from < 0) continue;
    const SequenceRows& own = rows.sequences[s];
    for (int64_t row = own.first_row; row < own.first_row + own.num_rows; ++row) {
      const int64_t position = own.first_position + row - own.first_row;
      const int64_t num_kept = std::ssize(sequence.experts.ids) / (num_layers * k);
      const auto logit_row = std::ranges::lower_bound(rows.logit_rows, row);
      if (position != sequence.experts.from + num_kept || logit_row == rows.logit_rows.end() ||
          *logit_row != row)
        continue;
      for (int64_t layer = 0; layer < num_layers; ++layer) {
        const int64_t place = layer + 1 < num_layers ? row : logit_row - rows.logit_rows.begin();
        const int32_t* ids = rows.experts.data() + (layer * num_rows + place) * k;
        sequence.experts.ids.insert(sequence.experts.ids.end(), ids, ids + k);
      }
    }
  }
}

// Null if not requested, or if some were never computed. A step enqueued before the last token was known adds
// surplus rows, which are cut off.
std::shared_ptr<const std::vector<int32_t>> StepLoop::take_experts(Sequence& sequence) const {
  if (sequence.experts.from < 0) return nullptr;
  const int64_t num_tokens = std::max<int64_t>(sequence.num_known_tokens() - 1 - sequence.experts.from, 0);
  const ModelConfig& config = executor_.config();
  const int64_t num_experts = num_tokens * config.num_layers * config.top_k;
  if (std::ssize(sequence.experts.ids) < num_experts) return nullptr;
  sequence.experts.ids.resize(static_cast<size_t>(num_experts));
  return std::make_shared<const std::vector<int32_t>>(std::move(sequence.experts.ids));
}

}  // namespace fp4moe
