// The autotuner: times the runner's tactics on the checkpoint's own experts before serving.
#pragma once

#include <functional>
#include <string>

#include "io/checkpoint/checkpoint.h"
#include "model/plan_model.h"
#include "moe/plan/tactics.h"

namespace fp4moe {

struct TuneResult {
  MoePlan moe;       // the plan with the chosen tactics
  std::string note;  // the choice and how it was made, for the log
};

// Returns the shipped default if tuning is disabled, the runner or scheme has nothing to choose from, or the
// job has several processes (they would have to agree before the job that connects them is open). Otherwise
// returns the cached choice for this machine, build, number of threads and shape, or times the tactics for at
// most --autotune-budget seconds and caches the result. A tactic can win only if its output equals the
// default's, bit for bit on a CPU and within a tolerance on a GPU (engine/startup/device_autotune.h). A cache
// that cannot be read or written only causes a warning.
Result<TuneResult> autotune(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// Returns the time in seconds that `tactics` take for `rows` rows of every expert; negative if the output is
// wrong. On a CPU, autotune() times real experts; tests use a stand-in.
using TacticTimer = std::function<double(const Tactics& tactics, int64_t rows)>;

// Chooses the fastest tactic for every bucket and op according to `timer`, which it calls in rounds while
// `has_time()` returns true. A challenger must be correct in every round and at least 3% faster than the
// default. Untimed entries keep the default.
Tactics choose_tactics(const TacticTimer& timer, const std::function<bool()>& has_time);

}  // namespace fp4moe
