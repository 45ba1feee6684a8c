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
  moves.clear();
}

Batch GroupRows::batch() {
  return {.token_ids = token_ids,
          .positions = positions,
          .sequences = sequences,
          .logit_rows = logit_rows,
          .routed_experts = experts.empty() ? nullptr : experts.data(),
          .state_copies = state_copies,
          .moves = moves};
}

void GroupRows::allocate_experts(std::span<const ScheduledRows> step, const ModelConfig& config) {
  const auto wants = [](const ScheduledRows& scheduled) { return scheduled.sequence->experts.from >= 0; };
  if (std::ranges::none_of(step, wants)) return;
  experts.resize(token_ids.size() * static_cast<size_t>(config.num_layers * config.top_k));
}

// Records each token's experts once: a retracted sequence recomputes its rows, with the same experts. The
// last layer has only the rows whose logits are computed, which include every row not yet recorded.
void GroupRows::record_experts(int64_t index, Sequence& sequence, const ModelConfig& config) const {
  SequenceExperts& recorded = sequence.experts;
  const int64_t num_layers = config.num_layers, k = config.top_k, num_rows = std::ssize(token_ids);
  const int64_t row = logit_rows[static_cast<size_t>(index)];
  const int64_t next = recorded.from + std::ssize(recorded.ids) / (num_layers * k);
  if (recorded.from < 0 || positions[static_cast<size_t>(row)] != next) return;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const int32_t* ids = experts.data() + (layer * num_rows + (layer + 1 < num_layers ? row : index)) * k;
    recorded.ids.insert(recorded.ids.end(), ids, ids + k);
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
