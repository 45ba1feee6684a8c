// The ranks of a model on GPUs. Rank 0 runs on the caller's thread and each other rank on its own thread.
#pragma once

#include <memory>

#include "engine/ranks/rank.h"
#include "engine/ranks/rank_group.h"

namespace fp4moe {

// Loads all ranks in parallel, then records their graphs. kUnsupported names GPUs that cannot share memory;
// kDoesNotFit: an allocation on a GPU failed.
Result<std::unique_ptr<RankGroup>> make_gpu_group(const RankSetup& setup);

}  // namespace fp4moe
