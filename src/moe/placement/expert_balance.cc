#include "moe/placement/expert_balance.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

// A replica to be placed, with its part of its expert's rows.
struct Replica {
  int32_t expert;
  double load;
};

struct RankPack {
  std::vector<Replica> replicas;
  double load = 0;

  bool has(int32_t expert) const {
    return std::ranges::find(replicas, expert, &Replica::expert) != replicas.end();
  }
  void add(const Replica& replica) {
    replicas.push_back(replica);
    load += replica.load;
  }
};

// Gives each redundant expert to the logical expert whose replicas have the most rows each. More replicas
// than ranks are of no use, so such an expert comes last.
std::vector<int64_t> count_replicas(std::span<const int64_t> loads, const PlacementShape& shape) {
  std::vector<int64_t> counts(loads.size(), 1);
  const auto is_hotter = [&](size_t a, size_t b) {
    const bool a_is_full = counts[a] >= shape.num_ranks, b_is_full = counts[b] >= shape.num_ranks;
    if (a_is_full != b_is_full) return b_is_full;
    const double x = static_cast<double>(loads[a]) / static_cast<double>(counts[a]);
    const double y = static_cast<double>(loads[b]) / static_cast<double>(counts[b]);
    if (x != y) return x > y;
    return counts[a] != counts[b] ? counts[a] < counts[b] : a < b;
  };
  for (int64_t i = shape.num_logical; i < shape.num_physical; ++i) {
    size_t hottest = 0;
    for (size_t e = 1; e < loads.size(); ++e)
      if (is_hotter(e, hottest)) hottest = e;
    ++counts[hottest];
  }
  return counts;
}

// All replicas, the one with the most rows first.
std::vector<Replica> sorted_replicas(std::span<const int64_t> loads, const PlacementShape& shape) {
  const std::vector<int64_t> counts = count_replicas(loads, shape);
  std::vector<Replica> replicas;
  for (size_t e = 0; e < loads.size(); ++e)
    replicas.insert(
        replicas.end(), static_cast<size_t>(counts[e]),
        {static_cast<int32_t>(e), static_cast<double>(loads[e]) / static_cast<double>(counts[e])});
  std::ranges::stable_sort(replicas, std::ranges::greater(), &Replica::load);
  return replicas;
}

// Places each replica on the rank with the fewest rows so far that has room and, if possible, no other
// replica of the same expert.
std::vector<RankPack> pack_replicas(const std::vector<Replica>& replicas, const PlacementShape& shape) {
  std::vector<RankPack> packs(static_cast<size_t>(shape.num_ranks));
  for (const Replica& replica : replicas) {
    RankPack* best = nullptr;
    bool best_has = true;
    for (RankPack& pack : packs) {
      if (std::ssize(pack.replicas) == shape.experts_per_rank()) continue;
      const bool has = pack.has(replica.expert);
      if (best == nullptr || (best_has && !has) || (best_has == has && pack.load < best->load)) {
        best = &pack;
        best_has = has;
      }
    }
    best->add(replica);
  }
  return packs;
}

struct Swap {
  size_t rank = 0, mine = 0, theirs = 0;
  double busiest = 0;  // rows of the busier of the two ranks after it
};

// Returns the swap of a replica on `busy` for one on another rank that helps most.
Swap best_swap(const std::vector<RankPack>& packs, size_t busy) {
  const RankPack& from = packs[busy];
  Swap best{.busiest = from.load};
  for (size_t r = 0; r < packs.size(); ++r) {
    if (r == busy) continue;
    for (size_t i = 0; i < from.replicas.size(); ++i) {
      const Replica& mine = from.replicas[i];
      for (size_t j = 0; j < packs[r].replicas.size(); ++j) {
        const Replica& theirs = packs[r].replicas[j];
        const double moved = mine.load - theirs.load;
        const double busiest = std::max(from.load - moved, packs[r].load + moved);
        if (moved <= 0 || busiest >= best.busiest) continue;
        if (packs[r].has(mine.expert) || from.has(theirs.expert)) continue;
        best = {r, i, j, busiest};
      }
    }
  }
  return best;
}

// Swaps replicas between the busiest rank and others while that helps.
void improve(std::vector<RankPack>& packs, double mean) {
  constexpr int kMaxSwaps = 64;
  constexpr double kGoodEnough = 1.005;
  for (int i = 0; i < kMaxSwaps; ++i) {
    const auto busiest = std::ranges::max_element(packs, {}, &RankPack::load);
    if (busiest->load <= kGoodEnough * mean) return;
    const auto busy = static_cast<size_t>(busiest - packs.begin());
    const Swap swap = best_swap(packs, busy);
    if (swap.busiest >= busiest->load) return;
    Replica& mine = busiest->replicas[swap.mine];
    Replica& theirs = packs[swap.rank].replicas[swap.theirs];
    busiest->load += theirs.load - mine.load;
    packs[swap.rank].load += mine.load - theirs.load;
    std::swap(mine, theirs);
  }
}

double total_of(std::span<const int64_t> loads) {
  return std::accumulate(loads.begin(), loads.end(), 0.0,
                         [](double sum, int64_t n) { return sum + static_cast<double>(n); });
}

// The experts of each rank, ascending.
std::vector<std::vector<int32_t>> balanced_ranks(std::span<const int64_t> loads,
                                                 const PlacementShape& shape) {
  std::vector<RankPack> packs = pack_replicas(sorted_replicas(loads, shape), shape);
  improve(packs, total_of(loads) / shape.num_ranks);
  std::vector<std::vector<int32_t>> ranks;
  for (const RankPack& pack : packs) {
    std::vector<int32_t>& experts = ranks.emplace_back();
    for (const Replica& replica : pack.replicas) experts.push_back(replica.expert);
    std::ranges::sort(experts);
  }
  return ranks;
}

ExpertPlacement placement_of(const PlacementShape& shape, const std::vector<std::vector<int32_t>>& ranks) {
  std::vector<int32_t> logical_of;
  for (const auto& experts : ranks) logical_of.insert(logical_of.end(), experts.begin(), experts.end());
  auto placement = ExpertPlacement::make(shape, std::move(logical_of));
  FP4MOE_CHECK(placement.ok(), placement.status().message());
  return std::move(*placement);
}

// Orders a rank's experts so that those in `current`, its present ones, stay where they are.
std::vector<int32_t> keep_places(std::vector<int32_t> experts, std::span<const int32_t> current) {
  std::vector<int32_t> placed(current.size(), -1);
  for (size_t i = 0; i < current.size(); ++i) {
    const auto found = std::ranges::find(experts, current[i]);
    if (found == experts.end()) continue;
    placed[i] = current[i];
    experts.erase(found);
  }
  size_t next = 0;
  for (int32_t& expert : placed)
    if (expert < 0) expert = experts[next++];
  return placed;
}

double busiest_load(std::span<const int64_t> loads, const ExpertPlacement& placement) {
  return std::ranges::max(rank_loads(loads, placement));
}

}  // namespace

std::vector<double> rank_loads(std::span<const int64_t> loads, const ExpertPlacement& placement) {
  const PlacementShape& shape = placement.shape();
  FP4MOE_CHECK(std::ssize(loads) == shape.num_logical,
               std::to_string(loads.size()) + " loads for " + std::to_string(shape.num_logical) + " experts");
  std::vector<double> sums(static_cast<size_t>(shape.num_ranks));
  for (int64_t e = 0; e < shape.num_logical; ++e) {
    const double of_rank = static_cast<double>(loads[static_cast<size_t>(e)]) / shape.num_ranks;
    for (int source = 0; source < shape.num_ranks; ++source) {
      const std::span<const int32_t> choices = placement.replicas_for(e, source);
      for (const int32_t p : choices)
        sums[static_cast<size_t>(shape.rank_of(p))] += of_rank / static_cast<double>(choices.size());
    }
  }
  return sums;
}

double imbalance(std::span<const int64_t> loads, const ExpertPlacement& placement) {
  const double total = total_of(loads);
  return total > 0 ? busiest_load(loads, placement) * placement.shape().num_ranks / total : 1;
}

ExpertPlacement balance_experts(std::span<const int64_t> loads, const PlacementShape& shape) {
  FP4MOE_CHECK(std::ranges::all_of(loads, [](int64_t load) { return load >= 0; }), "a negative load");
  ExpertPlacement balanced = placement_of(shape, balanced_ranks(loads, shape));
  ExpertPlacement trivial = ExpertPlacement::trivial(shape);
  return busiest_load(loads, balanced) < busiest_load(loads, trivial) ? std::move(balanced)
                                                                      : std::move(trivial);
}

ExpertPlacement rebalance_experts(std::span<const int64_t> loads, const ExpertPlacement& current) {
  constexpr double kWorthMoving = 0.99;
  const PlacementShape& shape = current.shape();
  const ExpertPlacement balanced = balance_experts(loads, shape);
  if (busiest_load(loads, balanced) >= kWorthMoving * busiest_load(loads, current)) return current;
  const auto count = static_cast<size_t>(shape.experts_per_rank());
  std::vector<std::vector<int32_t>> ranks;
  for (size_t r = 0; r < static_cast<size_t>(shape.num_ranks); ++r) {
    const auto mine = balanced.logical_of().subspan(r * count, count);
    ranks.push_back(keep_places({mine.begin(), mine.end()}, current.logical_of().subspan(r * count, count)));
  }
  return placement_of(shape, ranks);
}

}  // namespace fp4moe
