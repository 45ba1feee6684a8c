// RankContext: a rank's place in the job, and its communicators. With one rank all communicators are null;
// ranks on GPUs have the device_ members instead of `world` and `attention`.
#pragma once

#include "comm/communicator.h"
#include "comm/device_communicator.h"
#include "model/move_area.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

struct RankContext {
  RankLayout layout;
  Communicator* world = nullptr;      // all tp ranks
  Communicator* attention = nullptr;  // this rank's group; null if the group is one rank
  // On GPUs: this rank's group (null if it is one rank), and all ranks (null if they exchange no rows).
  const DeviceCommunicator* device_group = nullptr;
  const DeviceCommunicator* device_world = nullptr;
  // On GPUs: the ranks that share the vocabulary of LM heads, this rank's group or all ranks; null if this
  // rank has the whole vocabulary.
  const DeviceCommunicator* device_head = nullptr;
  Communicator* movers = nullptr;  // all ranks, on the host, that move experts; null if there is only one
  MoveArea move_area;              // for the experts that they move
  int64_t a2a_region_offset = 0;   // offset of the transport's memory in the symmetric heap, in bytes
};

}  // namespace fp4moe
