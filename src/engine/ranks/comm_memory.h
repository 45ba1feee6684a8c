// CommMemory: layout of each rank's symmetric heap, exact to the byte.
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
  CommRegion world, attention;  // attention: all zero if a group has one rank or there is one group
  int64_t a2a_offset = 0, a2a_bytes = 0;
  StepRegion step;
  int64_t communicator_bytes = 0;  // of both regions
  int64_t step_bytes = 0;          // steps and logits; 0 if all ranks are in one process
  // Ranks on GPUs: of a group, and of all ranks. Either is empty if not needed; unused members are 0.
  DeviceRegion device_attention, device_world;
  int64_t heap_bytes = 0;  // per rank, the sum
};

// One rank needs nothing. kDoesNotFit: --a2a-memory-budget is too small for the plan's transport.
Result<CommMemory> comm_memory(const MoePlan& plan, const StepLimits& limits);

}  // namespace fp4moe
