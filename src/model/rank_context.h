// RankContext: what a rank's model needs to know of the others. With one rank both communicators are null.
#pragma once

#include "comm/communicator.h"
#include "moe/rank_layout.h"

namespace fp4moe {

struct RankContext {
  RankLayout layout;
  Communicator* world = nullptr;      // all tp ranks
  Communicator* attention = nullptr;  // the ranks of this one's group; null where it is alone
  int64_t a2a_region_offset = 0;      // of the transport's memory in the symmetric heap
};

}  // namespace fp4moe
