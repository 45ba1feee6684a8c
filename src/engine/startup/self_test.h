// Compares the chosen runner row with the oracle before serving, on the checkpoint's own experts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/expert_weights.h"
#include "model/plan_model.h"
#include "moe/table.h"

namespace fp4moe {

// Returns the largest permitted difference from the oracle, as relative L2 of an expert's output on the same
// rows: 3e-3 for w4a16 and for w4a8 with INT8 tokens; 5e-3 for w4a8 with FP8 tokens and 2e-2 for w4a4, where
// the last bit of a sum can flip a code of the intermediate.
double self_test_budget(const Numerics& numerics);

struct SelfTestReport {
  int64_t num_layers = 0, num_experts = 0;  // that were compared
  double worst_error = 0;
};

// Compares the outputs y [L, ...] of a runner's experts, numbered `names`, with the oracle's. kInternal names
// the expert, its error and the budget; NaN never passes.
Status compare_experts(std::span<const float> y, std::span<const float> reference,
                       const std::vector<int64_t>& names, const RunnerRow& runner, const Numerics& numerics,
                       SelfTestReport& report);

// Compares the experts of `tested`, run by the plan's row, with those of `oracle`, run by the oracle row for
// the plan's numerics. Both hold the same number of experts. kInternal: as for compare_experts().
Status compare_with_oracle(const MoePlan& plan, const MoeWeightsView& tested, const MoeWeightsView& oracle,
                           const std::vector<int64_t>& names, ThreadPool& pool, SelfTestReport& report);

// Tests four experts of one layer (--self-test fast) or every expert of every layer (full). The message of
// kInternal also names the layer.
Result<SelfTestReport> self_test(const Checkpoint& checkpoint, const ModelConfig& config,
                                 const ModelPlan& plan, ThreadPool& pool);

// Runs self_test() unless --self-test is off, and logs one line about `whose` experts.
Status run_self_test(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                     const std::string& whose = "");

}  // namespace fp4moe
