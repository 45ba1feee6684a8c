// The rank of a model on a GPU: steps are asked of one stream, decode steps of a size that was recorded as
// one graph, and tokens are chosen where the logits are.
#pragma once

#include <memory>

#include "engine/rank.h"
#include "engine/rank_group.h"

namespace fp4moe {

// Loads, then records a graph for each decode size, largest first: all of them use the model's one scratch
// memory. kDoesNotFit if the GPU refuses memory.
Result<std::unique_ptr<RankGroup>> make_device_rank(const RankSetup& setup);

}  // namespace fp4moe
