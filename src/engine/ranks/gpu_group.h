// The ranks of a model on GPUs, one thread each; one rank has no thread.
#pragma once

#include <memory>

#include "engine/ranks/rank.h"
#include "engine/ranks/rank_group.h"

namespace fp4moe {

// Loads all ranks in parallel, then records their graphs. kUnsupported names GPUs that cannot share memory;
// kDoesNotFit: a GPU refuses memory.
Result<std::unique_ptr<RankGroup>> make_gpu_group(const RankSetup& setup);

}  // namespace fp4moe
