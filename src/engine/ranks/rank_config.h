// Settings that the ranks of a job share, derived from the plan and the flags.
#pragma once

#include <chrono>
#include <string>

#include "engine/ranks/rank_group.h"
#include "engine/ranks/step_batches.h"

namespace fp4moe {

// Returns the number of ranks in this process according to the launcher. Works before the fabric is opened.
int local_ranks(const ModelPlan& plan);

// Returns --comm-timeout.
std::chrono::nanoseconds comm_timeout(const EngineConfig& flags);

// Returns the most state slots that a data-parallel group uses, with slot 0; 0: the model has no states. The
// same in all processes, whatever their memory.
int64_t most_state_slots(const ModelConfig& config, const EngineConfig& flags, int num_groups);
// Returns the number of replay rows in each of them.
int64_t num_replay_rows(const ModelConfig& config, const EngineConfig& flags);

// Returns whether window layers have separate pages (model/kv_window.h).
bool has_window_pages(const ModelConfig& config, const EngineConfig& flags);

// Returns the limits for one step. The numbers of pages are upper bounds that do not depend on this
// process's memory.
StepLimits step_limits(const ModelConfig& config, const ModelPlan& plan, const EngineConfig& flags,
                       const RankGroupOptions& options);

// Returns the sizes of the plan's draft model; all 0 without one.
DraftShape draft_shape(const ModelPlan& plan, const RankGroupOptions& options);

// Returns the experts' plan of the plan's draft model; null without one, or if it has no experts.
const MoePlan* draft_moe(const ModelPlan& plan);

// Returns, as text, everything that must be identical in all processes: the checkpoint's identity, sizes,
// layout and numerics. Paths, threads and available memory may differ. `draft`: the checkpoint of the draft
// model, null if it has none.
std::string rank_config_text(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                             const EngineConfig& flags, const RankGroupOptions& options,
                             const Checkpoint* draft = nullptr);

}  // namespace fp4moe
