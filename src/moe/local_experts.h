// What a rank has of a layer's experts, checked against the plan.
#pragma once

#include <vector>

#include "io/expert_weights.h"
#include "moe/plan.h"

namespace fp4moe {

// weights are those of all E experts, whole. The result: this rank's experts, of each its rows of gate and up
// and its columns of down; the down bias only on the first shard. kInvalidArgument where sizes are not the
// plan's.
Result<std::vector<ExpertWeightsView>> local_experts(const MoeProblem& problem,
                                                     const MoeWeightsView& weights);

}  // namespace fp4moe
