// What the ranks of a job have in common, from the plan and the flags.
#pragma once

#include <chrono>
#include <string>

#include "engine/rank_group.h"
#include "engine/step_batches.h"

namespace fp4moe {

// Ranks of this process, as the launcher says, before the fabric is there.
int local_ranks(const ModelPlan& plan);

// --comm-timeout.
std::chrono::nanoseconds comm_timeout(const EngineConfig& flags);

// num_kv_pages: as many as there can ever be, whatever memory this process has.
StepLimits step_limits(const ModelConfig& config, const ModelPlan& plan, const EngineConfig& flags,
                       const RankGroupOptions& options);

// Everything that processes must have been given alike, as text: the checkpoint's identity, sizes, layout and
// numerics. Paths, threads and memory may differ.
std::string rank_config_text(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                             const EngineConfig& flags, const RankGroupOptions& options);

}  // namespace fp4moe
