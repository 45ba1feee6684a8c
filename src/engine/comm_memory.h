// CommMemory: what the symmetric heap of each rank holds, to the byte.
#pragma once

#include <cstdint>

#include "comm/communicator.h"
#include "engine/step_runner.h"
#include "moe/plan.h"

namespace fp4moe {

// Signal slots of the communicators (comm/endpoint.h).
constexpr int kWorldSlot = 0, kAttentionSlot = 4;

struct CommMemory {
  CommRegion world, attention;  // attention: sizes 0 where a group is one rank
  int64_t a2a_offset = 0, a2a_bytes = 0;
  StepRegion step;
  int64_t communicator_bytes = 0;  // of both
  int64_t step_bytes = 0;          // steps and logits; 0 where all ranks are in one process
  int64_t heap_bytes = 0;          // of each rank: the sum
};

// One rank needs nothing. kDoesNotFit: the budget of the plan's transport is too small for it.
Result<CommMemory> comm_memory(const MoePlan& plan, const StepLimits& limits);

}  // namespace fp4moe
