// ExpertMoves: the result of Engine::rebalance_experts().
#pragma once

#include <cstdint>

namespace fp4moe {

struct ExpertMoves {
  int64_t num_layers = 0;   // layers with a new placement
  int64_t num_experts = 0;  // physical experts that have other weights than before, over all layers
  int64_t num_bytes = 0;    // of these weights
  // The busiest rank's rows divided by the mean, over all layers: for the loads since the last rebalance,
  // with the old and with the new placement. 1 without any rows.
  double imbalance_before = 1, imbalance_after = 1;
  double seconds = 0;  // in which no step ran
};

}  // namespace fp4moe
