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
  bool last_row_only = false;    // logits of each step's last row, else of all rows
  int short_rank = -1;           // this rank is given a token less
  bool first_rank_only = false;  // only the first rank of each group asks for logits
};

// Logits [rows, V] of each group's prompt, step by step; a group whose prompt is over, or empty, goes on
// without rows until the longest one is. prompts.size() == dp. kInternal if two ranks of a group disagree in
// a bit.
Result<std::vector<std::vector<float>>> run_ranks(const RankRun& run,
                                                  const std::vector<std::vector<int32_t>>& prompts);

}  // namespace fp4moe
