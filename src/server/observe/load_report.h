// The content of GET /expert_load and /expert_load.svg: how evenly the routers spread tokens over the
// experts.
#pragma once

#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/json.h"
#include "server/observe/load_history.h"

namespace fp4moe {

// How evenly one layer's tokens are distributed.
struct LayerBalance {
  int64_t tokens = 0;        // routed tokens, summed over all experts
  double mean = 0;           // tokens per expert
  double max_over_mean = 0;  // 1: even, E: all tokens to one expert; 0: no tokens yet
  int64_t idle_experts = 0;  // experts without a token
};
std::vector<LayerBalance> layer_balance(const ExpertLoad& load);

struct LoadReport {
  const ModelInfo& info;
  double asked_seconds;  // requested window; 0: since the start
  const LoadWatch::Window& window;
};
// "balance": mean and maximum of max_over_mean over the layers; "hottest": the experts with the most tokens
// relative to their layer's mean.
json load_json(const LoadReport& report);
// An SVG heat map: a row per layer, a column per expert, and each row's balance next to it.
std::string load_svg(const LoadReport& report);

}  // namespace fp4moe
