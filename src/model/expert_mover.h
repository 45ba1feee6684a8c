// ExpertMover: moves the experts of a model's layers between its ranks, by the loads that the ranks have
// counted. All ranks call it together between two steps, and compute the same placements.
//
// Every expert of a layer that moves is cut alike, so that a slice of all of them fits into half of each
// rank's part of the area (model/move_area.h). For each slice:
//
//   every rank: the slice of each expert that it sends -> the area of the rank that receives it
//   all ranks wait for each other
//   every rank: its area -> the slices of its experts
//
// The next slice is sent through the other half, so ranks meet once for each slice. Ranks in several
// processes send the slices over the fabric instead.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "comm/communicator.h"
#include "fp4moe/expert_moves.h"
#include "model/move_area.h"
#include "moe/expert_counters.h"
#include "moe/placement/placed_experts.h"

namespace fp4moe {

class ExpertMover {
 public:
  // world: all ranks; null if there is only one. `counters` are this rank's. Both must outlive the mover.
  // Areas in GPU memory are only for ranks of one process.
  ExpertMover(Communicator* world, const ExpertCounters& counters, MoveArea area = {});

  // layers: those of the counters. Takes the loads since the last call. An error fails the job: some ranks
  // may have moved experts. Until rebalance() has returned on all ranks, the others may write to this one's
  // part of the area.
  Result<ExpertMoves> rebalance(std::span<PlacedExperts* const> layers);

 private:
  // A physical expert takes the weights of another one.
  struct Move {
    int32_t from = 0, to = 0;
    int64_t place = 0;  // among the experts that the rank of `to` receives
  };
  // The moves of one layer.
  struct LayerMoves {
    int64_t layer = 0;
    PlacedExperts* experts = nullptr;
    std::vector<Move> sent, received;  // by this rank, both in the order of the other rank
    std::vector<int64_t> counts;       // [ranks, ranks]: from each rank to each other one
    int64_t most = 0;                  // that one rank sends or receives
  };
  struct Slice {
    int64_t first = 0, num_bytes = 0;  // of each expert
    int64_t stride = 0;                // between the places of two experts in the area
  };
  static std::vector<Move> moves_between(const ExpertPlacement& now, const ExpertPlacement& next);
  Result<std::vector<int64_t>> take_loads();
  Status share_area();
  LayerMoves moves_of_rank(std::vector<Move> moves, const PlacementShape& shape) const;
  Status move_layer(const LayerMoves& moves);
  Status move_slice(const LayerMoves& moves, const Slice& slice);
  Status send_slice(const LayerMoves& moves, const Slice& slice);
  // Where one rank's part of the area begins: that of the slices with odd numbers, or with even ones.
  uint8_t* half(int rank) const {
    return area_.of_rank[static_cast<size_t>(rank)] + (num_slices_ % 2) * half_bytes();
  }
  int64_t half_bytes() const { return area_.num_bytes / 2; }
  int rank() const { return world_ == nullptr ? 0 : world_->rank(); }
  int num_ranks() const { return world_ == nullptr ? 1 : world_->size(); }
  bool sends_over_fabric() const { return world_ != nullptr && !world_->endpoint().shares_addresses(); }

  Communicator* const world_;
  const ExpertCounters& counters_;
  MoveArea area_;
  Buffer memory_;               // this rank's part, if it is in host memory
  int64_t num_slices_ = 0;      // moved so far
  std::vector<int64_t> taken_;  // [layers, E]: this rank's counts at the last call
};

}  // namespace fp4moe
