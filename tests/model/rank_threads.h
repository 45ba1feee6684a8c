// A model on thread ranks: every rank loads its shard, every data-parallel group has its own prompt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/config.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct RankRun {
  std::string folder;  // checkpoint
  EngineConfig flags;  // tp, ep, dp, a2a, ...
  int64_t chunk = 8;   // prompt tokens of a group in one step
  int page_size = 4;
  bool last_row_only = false;    // compute logits only for each step's last row instead of all rows
  int short_rank = -1;           // this rank gets one token fewer than its group
  bool first_rank_only = false;  // only the first rank of each group computes logits
  // > 0: returns the logits of the target's MTP layer instead. The target runs all tokens of a prompt but the
  // last; the MTP layer runs the rows with the next tokens after each step, then this many rows more, each
  // with the choice of the row before it.
  int64_t num_chained = 0;
};

// Returns logits [rows, V] of each group's prompt, step by step. A group whose prompt is empty or has
// ended continues without rows until the longest prompt ends. prompts.size() == dp. Returns kInternal if the
// logits of two ranks of a group differ in a bit.
Result<std::vector<std::vector<float>>> run_ranks(const RankRun& run,
                                                  const std::vector<std::vector<int32_t>>& prompts);

}  // namespace fp4moe
