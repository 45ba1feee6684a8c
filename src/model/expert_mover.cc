#include "model/expert_mover.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>

#include "base/check.h"
#include "base/seconds.h"
#include "moe/placement/expert_balance.h"

namespace fp4moe {

ExpertMover::ExpertMover(Communicator* world, const ExpertCounters& counters)
    : world_(world),
      counters_(counters),
      taken_(counters.layers().size() * static_cast<size_t>(counters.num_experts())) {}

// Returns the loads [layers, E] of all ranks.
Result<std::vector<int64_t>> ExpertMover::take_loads() {
  std::vector<int64_t> counts(taken_.size());
  FP4MOE_RETURN_IF_ERROR(counters_.add_to(counts));
  std::vector<int64_t> loads(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) loads[i] = counts[i] - taken_[i];
  taken_ = std::move(counts);
  if (world_ == nullptr) return loads;
  const std::vector<int64_t> bytes(static_cast<size_t>(num_ranks()),
                                   std::ssize(loads) * int64_t{sizeof(int64_t)});
  std::vector<int64_t> all(loads.size() * static_cast<size_t>(num_ranks()));
  FP4MOE_RETURN_IF_ERROR(world_->all_gather({"expert_loads"}, loads.data(), bytes, all.data()));
  std::ranges::fill(loads, 0);
  for (size_t i = 0; i < all.size(); ++i) loads[i % loads.size()] += all[i];
  return loads;
}

// Each expert comes from a replica on the same rank, if there is one.
std::vector<ExpertMover::Move> ExpertMover::moves_between(const ExpertPlacement& now,
                                                          const ExpertPlacement& next) {
  const PlacementShape& shape = now.shape();
  std::vector<Move> moves;
  for (int32_t p = 0; p < shape.num_physical; ++p) {
    const int32_t expert = next.logical(p);
    if (now.logical(p) == expert) continue;
    const std::span<const int32_t> sources = now.replicas_for(expert, shape.rank_of(p));
    moves.push_back({sources[static_cast<size_t>(p) % sources.size()], p});
  }
  return moves;
}

// All weights are read before the first is overwritten. Both sides order the moves between two ranks as
// `moves` does.
Status ExpertMover::move_layer(int64_t layer, PlacedExperts& experts, const PlacementShape& shape,
                               std::span<const Move> moves) {
  const int64_t expert_bytes = experts.expert_bytes(), local_count = shape.experts_per_rank();
  const auto size = static_cast<size_t>(num_ranks());
  std::vector<int64_t> counts(size * size);
  for (const Move& move : moves)
    counts[static_cast<size_t>(shape.rank_of(move.from)) * size +
           static_cast<size_t>(shape.rank_of(move.to))] += expert_bytes;
  // Calls body(local expert, bytes) for the moves with one end on this rank, rank by rank of the other end.
  const auto for_mine = [&](int32_t Move::*mine, int32_t Move::*other, std::vector<uint8_t>& bytes,
                            const auto& body) -> Status {
    int64_t at = 0;
    for (int peer = 0; peer < num_ranks(); ++peer)
      for (const Move& move : moves) {
        if (shape.rank_of(move.*mine) != rank() || shape.rank_of(move.*other) != peer) continue;
        FP4MOE_RETURN_IF_ERROR(body(move.*mine % local_count, bytes.data() + at));
        at += expert_bytes;
      }
    return {};
  };
  const auto count_mine = [&](int32_t Move::*mine) {
    return std::ranges::count_if(moves,
                                 [&](const Move& move) { return shape.rank_of(move.*mine) == rank(); });
  };
  sent_.resize(static_cast<size_t>(count_mine(&Move::from) * expert_bytes));
  received_.resize(static_cast<size_t>(count_mine(&Move::to) * expert_bytes));
  FP4MOE_RETURN_IF_ERROR(for_mine(&Move::from, &Move::to, sent_, [&](int64_t local, uint8_t* to) {
    return experts.read_expert(local, to);
  }));
  if (world_ == nullptr)
    std::swap(sent_, received_);
  else
    FP4MOE_RETURN_IF_ERROR(world_->all_to_all({"move_experts", static_cast<int>(layer)}, sent_.data(), counts,
                                              received_.data()));
  return for_mine(&Move::to, &Move::from, received_,
                  [&](int64_t local, const uint8_t* from) { return experts.write_expert(local, from); });
}

Result<ExpertMoves> ExpertMover::rebalance(std::span<PlacedExperts* const> layers) {
  FP4MOE_CHECK(layers.size() == counters_.layers().size(), std::to_string(layers.size()) +
                                                               " layers with experts, but counters for " +
                                                               std::to_string(counters_.layers().size()));
  const auto start = std::chrono::steady_clock::now();
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> all_loads, take_loads());
  ExpertMoves result;
  double rows = 0, before = 0, after = 0;  // busiest ranks' rows, times the number of ranks
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto count = static_cast<size_t>(counters_.num_experts());
    const auto loads = std::span(all_loads).subspan(i * count, count);
    const ExpertPlacement now = layers[i]->placement();
    ExpertPlacement next = rebalance_experts(loads, now);
    const auto of_layer = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
    rows += of_layer;
    before += of_layer * imbalance(loads, now);
    after += of_layer * imbalance(loads, next);
    if (next == now) continue;
    const std::vector<Move> moves = moves_between(now, next);
    const auto copy_start = std::chrono::steady_clock::now();
    FP4MOE_RETURN_IF_ERROR(move_layer(counters_.layers()[i], *layers[i], now.shape(), moves));
    result.copy_seconds += seconds_since(copy_start);
    FP4MOE_RETURN_IF_ERROR(layers[i]->set_placement(std::move(next)));
    ++result.num_layers;
    result.num_experts += std::ssize(moves);
    result.num_bytes += std::ssize(moves) * layers[i]->expert_bytes();
  }
  sent_ = {};
  received_ = {};
  if (rows > 0) {
    result.imbalance_before = before / rows;
    result.imbalance_after = after / rows;
  }
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace fp4moe
