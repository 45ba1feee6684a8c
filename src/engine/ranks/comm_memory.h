// CommMemory: the layout of each rank's symmetric heap, exact to the byte.
#pragma once

#include <cstdint>

#include "comm/communicator.h"
#include "comm/device_communicator.h"
#include "engine/ranks/step_runner.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// Signal slots of the communicators (comm/endpoint.h).
constexpr int kWorldSlot = 0, kAttentionSlot = 4;

struct CommMemory {
  CommRegion world, attention;  // attention: all zero if each group has one rank or there is only one group
  int64_t a2a_offset = 0;       // on CPUs
  int64_t a2a_bytes = 0;        // of both models
  int64_t draft_a2a_bytes = 0;  // GPU: the part of it that is for a draft model's exchanges
  StepRegion step;
  int64_t communicator_bytes = 0;  // for `world` and `attention`
  int64_t step_bytes = 0;          // for steps and logits; 0 if all ranks are in one process
  // For ranks on GPUs: one group's region, the region of all ranks for the LM heads that they share, and
  // those for each model's exchanges. A region that is not needed is empty, and unused members are 0. Staged
  // regions (ranks in several processes) are separate allocations.
  DeviceRegion device_attention, device_head, device_world, device_draft_world;
  int64_t move_offset = 0, move_bytes = 0;  // GPUs of one process: a rank's part of the MoveArea
  int64_t heap_bytes = 0;                   // the sum, per rank
};

// Returns an empty layout if there is only one rank. `draft`: of a draft model with experts, or null. On CPUs
// its exchanges use the target's region, because only one of the two models runs at a time. kDoesNotFit:
// --a2a-memory-budget is too small for a plan's transport.
Result<CommMemory> comm_memory(const MoePlan& plan, const StepLimits& limits, const MoePlan* draft = nullptr);

}  // namespace fp4moe
