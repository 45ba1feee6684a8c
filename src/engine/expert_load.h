// What Engine::expert_load() answers with, out of the ranks' counters.
#pragma once

#include <span>

#include "fp4moe/engine.h"
#include "model/model.h"

namespace fp4moe {

// `ranks`: the models of this process's ranks, at least one; num_ranks: those of the whole job.
ExpertLoad sum_expert_load(std::span<const Model* const> ranks, int num_ranks);

}  // namespace fp4moe
