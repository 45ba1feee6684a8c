// The rank of a model on a GPU: steps are enqueued on one stream, decode steps of a recorded size as one
// graph launch, and tokens are sampled on the device.
#pragma once

#include <memory>

#include "engine/ranks/rank.h"
#include "engine/ranks/rank_group.h"

namespace fp4moe {

// Loads the model, then records a graph for each decode size, largest first: all graphs share the model's
// scratch memory. kDoesNotFit if the GPU refuses memory.
Result<std::unique_ptr<RankGroup>> make_single_gpu_group(const RankSetup& setup);

}  // namespace fp4moe
