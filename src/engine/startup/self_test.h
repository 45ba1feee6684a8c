// Before serving: compares the chosen runner row with the oracle, on the checkpoint's own experts.
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

// Largest permitted difference from the oracle, as relative L2 of an expert's output on the same rows: 3e-3
// for w4a16 and w4a8 with INT8; 5e-3 for w4a8 with FP8 tokens and 2e-2 for w4a4, where the last bit of a sum
// can flip a code of the intermediate.
double self_test_budget(const Numerics& numerics);

struct SelfTestReport {
  int64_t num_layers = 0, num_experts = 0;  // compared
  double worst_error = 0;
};

// Compares outputs y [L, ...] of a runner's experts, numbered `names`, with the oracle's. kInternal names the
// expert, its error and the budget; NaN never passes.
Status compare_experts(std::span<const float> y, std::span<const float> reference,
                       const std::vector<int64_t>& names, const RunnerRow& runner, const Numerics& numerics,
                       SelfTestReport& report);

// Compares the experts of `tested`, run by the plan's row, with those of `oracle`, run by the oracle row for
// the plan's numerics. Both hold the same number of experts. kInternal as above.
Status compare_with_oracle(const MoePlan& plan, const MoeWeightsView& tested, const MoeWeightsView& oracle,
                           const std::vector<int64_t>& names, ThreadPool& pool, SelfTestReport& report);

// --self-test fast: four experts of one layer; full: every expert of every layer. On kInternal the message
// names the layer too.
Result<SelfTestReport> self_test(const Checkpoint& checkpoint, const ModelConfig& config,
                                 const ModelPlan& plan, ThreadPool& pool);

// The same, as --self-test demands (nothing if it is off); logs one line.
Status run_self_test(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan);

}  // namespace fp4moe
