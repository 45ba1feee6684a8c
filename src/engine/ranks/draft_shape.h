// DraftShape: the sizes of an executor's draft model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fp4moe {

struct DraftShape {
  int64_t vocab_size = 0;        // columns of its logits; 0: there is no draft model
  int64_t num_input_ids = 0;     // its batches' token ids are below this
  int64_t max_positions = 0;     // its batches' positions are below this
  bool takes_features = false;   // Batch::feature_rows is set
  int64_t max_batch_tokens = 0;  // most rows of one group's batch
  int64_t max_logit_rows = 0;    // most rows of logits, over all groups
};

// Returns the target's id, below vocab_size, of the draft model's id, or -1 if it has none. `token_ids`:
// Model::token_ids() of the draft model.
inline int32_t target_id(int32_t draft_id, std::span<const int32_t> token_ids, int64_t vocab_size) {
  if (draft_id < 0) return -1;
  const int32_t id = token_ids.empty() ? draft_id : token_ids[static_cast<size_t>(draft_id)];
  return id < vocab_size ? id : -1;
}

}  // namespace fp4moe
