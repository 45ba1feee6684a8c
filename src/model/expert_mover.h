// ExpertMover: moves the experts of a model's layers between its ranks, by the loads that the ranks have
// counted. All ranks call it together between two steps, and compute the same placements.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "fp4moe/expert_moves.h"
#include "moe/expert_counters.h"
#include "moe/placement/placed_experts.h"

namespace fp4moe {

class ExpertMover {
 public:
  // world: all ranks; null if there is only one. `counters` are this rank's. Both must outlive the mover.
  ExpertMover(Communicator* world, const ExpertCounters& counters);

  // layers: those of the counters. Takes the loads since the last call. While a layer's experts move, their
  // weights are twice in host memory. An error fails the job: some ranks may have moved experts.
  Result<ExpertMoves> rebalance(std::span<PlacedExperts* const> layers);

 private:
  // A physical expert takes the weights of another one.
  struct Move {
    int32_t from = 0, to = 0;
  };
  static std::vector<Move> moves_between(const ExpertPlacement& now, const ExpertPlacement& next);
  Result<std::vector<int64_t>> take_loads();
  Status move_layer(int64_t layer, PlacedExperts& experts, const PlacementShape& shape,
                    std::span<const Move> moves);
  int rank() const { return world_ == nullptr ? 0 : world_->rank(); }
  int num_ranks() const { return world_ == nullptr ? 1 : world_->size(); }

  Communicator* const world_;
  const ExpertCounters& counters_;
  std::vector<int64_t> taken_;            // [layers, E]: this rank's counts at the last call
  std::vector<uint8_t> sent_, received_;  // weights
};

}  // namespace fp4moe
