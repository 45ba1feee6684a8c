// The ranks of a model on GPUs. Rank 0 runs on the caller's thread and each other rank on its own thread;
// with ranks in several processes, each process has one rank.
#pragma once

#include <memory>

#include "engine/ranks/rank.h"
#include "engine/ranks/rank_group.h"
#include "engine/ranks/step_batches.h"

namespace fp4moe {

// Loads all ranks in parallel, then records their graphs. kUnsupported names GPUs that cannot share memory;
// kDoesNotFit: an allocation on a GPU failed.
Result<std::unique_ptr<RankGroup>> make_gpu_group(const RankSetup& setup);

// The same for a plan with several processes, each with one rank on its first visible GPU; all processes call
// it. kUnsupported: NCCL cannot be used (Nccl::open()), or two processes see the same GPU first.
Result<std::unique_ptr<RankGroup>> make_gpu_processes(const RankSetup& setup, const StepLimits& limits);

}  // namespace fp4moe
