#include "engine/step/group_rows.h"

#include <algorithm>
#include <utility>

namespace fp4moe {

void GroupRows::clear() {
  token_ids.clear();
  positions.clear();
  logit_rows.clear();
  sequences.clear();
  experts.clear();
}

Batch GroupRows::batch() {
  return {token_ids, positions, sequences, logit_rows, experts.empty() ? nullptr : experts.data()};
}

void GroupRows::allocate_experts(std::span<const ScheduledRows> step, const ModelConfig& config) {
  const auto wants = [](const ScheduledRows& scheduled) { return scheduled.sequence->experts.from >= 0; };
  if (std::ranges::none_of(step, wants)) return;
  experts.resize(token_ids.size() * static_cast<size_t>(config.num_layers * config.top_k));
}

// Records each token's experts once: a retracted sequence recomputes its rows, with the same experts. The
// last layer has only the rows whose logits are computed, which include every row not yet recorded.
void GroupRows::record_experts(std::span<const ScheduledRows> step, const ModelConfig& config) const {
  if (experts.empty()) return;
  const int64_t num_layers = config.num_layers, k = config.top_k;
  const int64_t num_rows = std::ssize(token_ids);
  for (size_t s = 0; s < step.size(); ++s) {
    SequenceExperts& recorded = step[s].sequence->experts;
    if (recorded.from < 0) continue;
    const SequenceRows& own = sequences[s];
    for (int64_t row = own.first_row; row < own.first_row + own.num_rows; ++row) {
      const int64_t position = own.first_position + row - own.first_row;
      const int64_t num_recorded = std::ssize(recorded.ids) / (num_layers * k);
      const auto logit_row = std::ranges::lower_bound(logit_rows, row);
      if (position != recorded.from + num_recorded || logit_row == logit_rows.end() || *logit_row != row)
        continue;
      for (int64_t layer = 0; layer < num_layers; ++layer) {
        const int64_t place = layer + 1 < num_layers ? row : logit_row - logit_rows.begin();
        const int32_t* ids = experts.data() + (layer * num_rows + place) * k;
        recorded.ids.insert(recorded.ids.end(), ids, ids + k);
      }
    }
  }
}

// Cuts off the surplus rows that a step has added if it was enqueued before the last token was known.
std::shared_ptr<const std::vector<int32_t>> take_experts(Sequence& sequence, const ModelConfig& config) {
  SequenceExperts& recorded = sequence.experts;
  if (recorded.from < 0) return nullptr;
  const int64_t num_tokens = std::max<int64_t>(sequence.num_known_tokens() - 1 - recorded.from, 0);
  const int64_t num_experts = num_tokens * config.num_layers * config.top_k;
  if (std::ssize(recorded.ids) < num_experts) return nullptr;
  recorded.ids.resize(static_cast<size_t>(num_experts));
  return std::make_shared<const std::vector<int32_t>>(std::move(recorded.ids));
}

}  // namespace fp4moe
