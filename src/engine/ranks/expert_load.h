// Engine::expert_load(), computed from the ranks' counters.
#pragma once

#include <span>

#include "fp4moe/engine.h"
#include "model/model.h"

namespace fp4moe {

// `ranks`: models of this process's ranks, at least one; num_ranks: ranks of the whole job.
ExpertLoad sum_expert_load(std::span<const Model* const> ranks, int num_ranks);

}  // namespace fp4moe
