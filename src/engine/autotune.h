// The autotuner: times the runner's tactics on the checkpoint's own experts before serving.
#pragma once

#include <functional>
#include <string>

#include "io/checkpoint.h"
#include "model/plan_model.h"
#include "moe/tactics.h"

namespace fp4moe {

struct TuneResult {
  MoePlan moe;       // the model's, with what was chosen
  std::string note;  // what was chosen and how, for the log
};

// The shipped default where the flags say so, the runner has no tactics, or several processes would have to
// agree before the job that connects them is open. Else what the cache holds for this machine, build, threads
// and shape, or what is timed within --autotune-budget seconds, and then cached. On a CPU every tactic's
// output must equal the default's bit for bit before it may win, on a GPU be within w4a16's budget of it
// (engine/device_autotune.h). A cache that cannot be read or written is a warning.
Result<TuneResult> autotune(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

// Seconds that `tactics` take for `rows` rows of every expert, and whether the output was right; what
// autotune() asks on a CPU, for a stand-in in tests. Returns a negative number for a wrong output.
using TacticTimer = std::function<double(const Tactics& tactics, int64_t rows)>;

// For every bucket and op the fastest tactic by `timer`, asked in rounds while `has_time()`; a challenger
// must be right each time and 3% faster than the default. Untimed places keep the default.
Tactics choose_tactics(const TacticTimer& timer, const std::function<bool()>& has_time);

}  // namespace fp4moe
