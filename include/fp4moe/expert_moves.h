// ExpertMoves: the result of Engine::rebalance_experts(), and the sums of all results.
#pragma once

#include <array>
#include <cstdint>

namespace fp4moe {

struct ExpertMoves {
  int64_t num_layers = 0;   // layers with a new placement
  int64_t num_experts = 0;  // physical experts that have other weights than before, over all layers
  int64_t num_bytes = 0;    // of these weights
  // The busiest rank's rows divided by the mean, over all layers: for the loads since the last rebalance,
  // with the old and with the new placement. 1 without any rows.
  double imbalance_before = 1, imbalance_after = 1;
  double seconds = 0;       // in which no step ran
  double copy_seconds = 0;  // the part of `seconds` in which rank 0 copied and exchanged weights
};

// All calls since Engine::make, by --enable-eplb or by rebalance_experts(), that did not fail.
struct ExpertMoveTotals {
  // Upper bounds of `by_seconds`, in seconds.
  static constexpr std::array<double, 14> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                     0.25,  0.5,    1,     2.5,  5,     10,   30};
  int64_t num_rebalances = 0, num_experts = 0, num_bytes = 0;
  double seconds = 0;
  std::array<int64_t, kBounds.size() + 1> by_seconds{};  // rebalances; the last element: above all bounds
  double imbalance_before = 1, imbalance_after = 1;      // of the last rebalance
};

}  // namespace fp4moe
