#include "engine/ranks/expert_load.h"

namespace fp4moe {

ExpertLoad sum_expert_load(std::span<const Model* const> ranks, int num_ranks) {
  ExpertLoad load;
  load.num_ranks = num_ranks;
  const ExpertCounters& first = ranks.front()->expert_counters();
  load.layers = first.layers();
  load.num_experts = first.num_experts();
  load.tokens.resize(load.layers.size() * static_cast<size_t>(load.num_experts));
  for (const Model* rank : ranks) {
    if (const Status status = rank->expert_counters().add_to(load.tokens); !status.ok())
      return {.failure = status.message()};
    ++load.counted_ranks;
  }
  return load;
}

}  // namespace fp4moe
