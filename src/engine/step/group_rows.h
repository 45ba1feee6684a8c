// GroupRows: the rows of one data-parallel group in a step, and the experts that they were routed to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/schedule/scheduler.h"
#include "model/model.h"

namespace fp4moe {

struct GroupRows {
  std::vector<int32_t> token_ids;
  std::vector<int64_t> positions, logit_rows;
  std::vector<SequenceRows> sequences;
  std::vector<StateCopy> state_copies;
  std::vector<RowsMove> moves;   // Batch::moves
  std::vector<int32_t> experts;  // laid out like Batch::routed_experts; empty: no sequence requests them

  void clear();  // keeps the memory
  Batch batch();
  // Before the forward pass: sizes `experts` if a sequence in the step requests them.
  void allocate_experts(std::span<const ScheduledRows> step, const ModelConfig& config);
  // After the forward pass: appends the experts of logit row `index` to its sequence if they are requested
  // and not yet recorded.
  void record_experts(int64_t index, Sequence& sequence, const ModelConfig& config) const;
};

// Moves the experts of all tokens except the last out of a sequence that ends. Returns null if they were not
// requested, or if some were never computed.
std::shared_ptr<const std::vector<int32_t>> take_experts(Sequence& sequence, const ModelConfig& config);

}  // namespace fp4moe
