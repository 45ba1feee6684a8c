// A rank's part of a layer's experts, checked against the plan.
#pragma once

#include <vector>

#include "io/checkpoint/expert_weights.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// `weights` are all physical experts, unsharded. Returns views of this rank's experts: its rows of gate and
// up, its columns of down and, on the first shard only, the down bias. kInvalidArgument if the sizes differ
// from the plan's.
Result<std::vector<ExpertWeightsView>> local_experts(const MoeProblem& problem,
                                                     const MoeWeightsView& weights);

// The same for bf16 experts.
Result<std::vector<Bf16ExpertView>> local_bf16_experts(const MoeProblem& problem,
                                                       const MoeWeightsView& weights);

// The weights of all physical experts, from those of all E logical ones.
MoeWeightsView physical_experts(const MoeWeightsView& logical, const ExpertPlacement& placement);

}  // namespace fp4moe
