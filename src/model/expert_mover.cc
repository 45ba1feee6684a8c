#include "model/expert_mover.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/seconds.h"
#include "moe/placement/expert_balance.h"

namespace fp4moe {

ExpertMover::ExpertMover(Communicator* world, const ExpertCounters& counters, MoveArea area)
    : world_(world),
      counters_(counters),
      area_(std::move(area)),
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
    moves.push_back({.from = sources[static_cast<size_t>(p) % sources.size()], .to = p});
  }
  return moves;
}

// Allocates the parts of an area in host memory and tells the ranks of one process where they are.
Status ExpertMover::share_area() {
  if (!area_.of_rank.empty()) return {};
  FP4MOE_ASSIGN_OR_RETURN(memory_, Buffer::make(area_.num_bytes));
  uint8_t* const own = memory_.data();
  std::vector<uint8_t*> parts(static_cast<size_t>(num_ranks()), own);
  if (world_ != nullptr && !sends_over_fabric())
    FP4MOE_RETURN_IF_ERROR(world_->exchange({"move_area"}, &own, sizeof own, parts.data()));
  area_.of_rank = std::move(parts);
  return {};
}

// The places follow the order of the sending ranks, as Communicator::all_to_all() does.
ExpertMover::LayerMoves ExpertMover::moves_of_rank(std::vector<Move> moves,
                                                   const PlacementShape& shape) const {
  const auto size = static_cast<size_t>(num_ranks());
  const auto rank_of = [&](int32_t physical) { return static_cast<size_t>(shape.rank_of(physical)); };
  LayerMoves result;
  result.counts.resize(size * size);
  std::vector<int64_t> sent(size), received(size);
  std::ranges::stable_sort(moves, {}, [&](const Move& move) { return rank_of(move.from); });
  for (Move& move : moves) {
    const size_t from = rank_of(move.from), to = rank_of(move.to);
    move.place = received[to]++;
    ++sent[from];
    ++result.counts[from * size + to];
    if (from == static_cast<size_t>(rank())) result.sent.push_back(move);
    if (to == static_cast<size_t>(rank())) result.received.push_back(move);
  }
  std::ranges::stable_sort(result.sent, {}, [&](const Move& move) { return rank_of(move.to); });
  result.most = std::max(std::ranges::max(sent), std::ranges::max(received));
  return result;
}

Status ExpertMover::move_layer(const LayerMoves& moves) {
  constexpr int64_t kAlignment = 256;  // of the places, so that copies between GPUs are fast
  const int64_t expert_bytes = moves.experts->expert_bytes(), room = half_bytes() / moves.most;
  const int64_t stride = room < kAlignment ? room : room / kAlignment * kAlignment;
  FP4MOE_CHECK(stride > 0, std::to_string(moves.most) + " experts of a rank move");
  for (int64_t first = 0; first < expert_bytes; first += stride) {
    const Slice slice = {first, std::min(stride, expert_bytes - first), stride};
    FP4MOE_RETURN_IF_ERROR(sends_over_fabric() ? send_slice(moves, slice) : move_slice(moves, slice));
    ++num_slices_;
  }
  return {};
}

// No rank writes weights of the slice before all ranks have read theirs. Once all ranks are here, each of
// them has also taken the slice before out of the other half of its area.
Status ExpertMover::move_slice(const LayerMoves& moves, const Slice& slice) {
  PlacedExperts& experts = *moves.experts;
  const PlacementShape& shape = experts.placement().shape();
  const int64_t local_count = shape.experts_per_rank();
  const auto num_bytes = static_cast<size_t>(slice.num_bytes);
  for (const Move& move : moves.sent) {
    uint8_t* const to = half(shape.rank_of(move.to)) + move.place * slice.stride;
    FP4MOE_RETURN_IF_ERROR(experts.read_expert(move.from % local_count, slice.first, {to, num_bytes}));
  }
  FP4MOE_RETURN_IF_ERROR(experts.finish_copies());
  if (world_ != nullptr) {
    const uint32_t geometry = geometry_hash(moves.counts);
    FP4MOE_RETURN_IF_ERROR(world_->barrier({"move_experts", static_cast<int>(moves.layer), geometry}));
  }
  for (const Move& move : moves.received) {
    const uint8_t* const from = half(rank()) + move.place * slice.stride;
    FP4MOE_RETURN_IF_ERROR(experts.write_expert(move.to % local_count, slice.first, {from, num_bytes}));
  }
  return {};
}

// The same over the fabric. This rank's part has the slices that it sends, then those that it receives.
Status ExpertMover::send_slice(const LayerMoves& moves, const Slice& slice) {
  PlacedExperts& experts = *moves.experts;
  const int64_t local_count = experts.placement().shape().experts_per_rank();
  const auto num_bytes = static_cast<size_t>(slice.num_bytes);
  uint8_t* const sent = memory_.data();
  uint8_t* const received = sent + half_bytes();
  uint8_t* next = sent;
  for (const Move& move : moves.sent) {
    FP4MOE_RETURN_IF_ERROR(experts.read_expert(move.from % local_count, slice.first, {next, num_bytes}));
    next += slice.num_bytes;
  }
  FP4MOE_RETURN_IF_ERROR(experts.finish_copies());
  std::vector<int64_t> counts = moves.counts;
  for (int64_t& count : counts) count *= slice.num_bytes;
  FP4MOE_RETURN_IF_ERROR(
      world_->all_to_all({"move_experts", static_cast<int>(moves.layer)}, sent, counts, received));
  for (const Move& move : moves.received) {
    const uint8_t* const from = received + move.place * slice.num_bytes;
    FP4MOE_RETURN_IF_ERROR(experts.write_expert(move.to % local_count, slice.first, {from, num_bytes}));
  }
  return experts.finish_copies();
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
    LayerMoves of_rank = moves_of_rank(moves, now.shape());
    of_rank.layer = counters_.layers()[i];
    of_rank.experts = layers[i];
    const auto copy_start = std::chrono::steady_clock::now();
    FP4MOE_RETURN_IF_ERROR(share_area());
    FP4MOE_RETURN_IF_ERROR(move_layer(of_rank));
    FP4MOE_RETURN_IF_ERROR(layers[i]->finish_copies());
    result.copy_seconds += seconds_since(copy_start);
    FP4MOE_RETURN_IF_ERROR(layers[i]->set_placement(std::move(next)));
    ++result.num_layers;
    result.num_experts += std::ssize(moves);
    result.num_bytes += std::ssize(moves) * layers[i]->expert_bytes();
  }
  if (rows > 0) {
    result.imbalance_before = before / rows;
    result.imbalance_after = after / rows;
  }
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace fp4moe
