// DraftShape: the sizes of an executor's draft model.
#pragma once

#include <cstdint>

namespace fp4moe {

struct DraftShape {
  int64_t vocab_size = 0;        // columns of its logits; 0: there is no draft model
  int64_t num_input_ids = 0;     // its batches' token ids are below this
  int64_t max_positions = 0;     // its batches' positions are below this
  bool takes_features = false;   // Batch::feature_rows is set
  int64_t max_batch_tokens = 0;  // most rows of one group's batch
  int64_t max_logit_rows = 0;    // most rows of logits, over all groups
};

}  // namespace fp4moe
