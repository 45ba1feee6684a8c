// What GET /expert_load and /expert_load.svg say: how evenly the routers spread tokens over the experts.
#pragma once

#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/json.h"
#include "server/load_history.h"

namespace fp4moe {

// How evenly one layer's tokens lie.
struct LayerBalance {
  int64_t tokens = 0;        // of all experts
  double mean = 0;           // tokens of an expert
  double max_over_mean = 0;  // 1: even, E: all in one expert; 0: no token yet
  int64_t idle_experts = 0;  // without a token
};
std::vector<LayerBalance> layer_balance(const ExpertLoad& load);

struct LoadReport {
  const ModelInfo& info;
  double asked_seconds;  // 0: since the start
  const LoadWatch::Window& window;
};
// balance: mean and worst of the layers' max over mean; hottest: experts by tokens over their layer's mean.
json load_json(const LoadReport& report);
// A picture: a row for each layer, a column for each expert, the rows' balance beside them.
std::string load_svg(const LoadReport& report);

}  // namespace fp4moe
