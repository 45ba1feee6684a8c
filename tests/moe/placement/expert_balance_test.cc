// Tests placements and the balancer: every expert has a replica, tables cover them, and no placement is worse
// than the trivial one.
#include "moe/placement/expert_balance.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

namespace fp4moe {
namespace {

// Rows of each expert, the hottest at a random place.
std::vector<int64_t> zipf_loads(int64_t num_experts, double exponent, uint32_t seed) {
  std::vector<int64_t> loads;
  for (int64_t e = 0; e < num_experts; ++e)
    loads.push_back(static_cast<int64_t>(1e6 / std::pow(static_cast<double>(e + 1), exponent)));
  std::shuffle(loads.begin(), loads.end(), std::mt19937(seed));
  return loads;
}

// Counts each rank's rows with a loop over all rows, without rank_loads().
std::vector<int64_t> routed_rows(std::span<const int64_t> loads, const ExpertPlacement& placement) {
  const PlacementShape& shape = placement.shape();
  std::vector<int64_t> rows(static_cast<size_t>(shape.num_ranks));
  for (int source = 0; source < shape.num_ranks; ++source) {
    const ReplicaTable table = placement.table_of(source);
    for (int64_t e = 0; e < shape.num_logical; ++e)
      for (int64_t row = 0; row < loads[static_cast<size_t>(e)]; ++row)
        ++rows[static_cast<size_t>(shape.rank_of(table.replica_of(static_cast<int32_t>(e), row)))];
  }
  return rows;
}

PlacementShape any_shape() {
  const int ranks = *rc::gen::inRange(1, 9);
  const int64_t logical = *rc::gen::inRange<int64_t>(1, 70);
  const int64_t per_rank = (logical + ranks - 1) / ranks + *rc::gen::inRange<int64_t>(0, 4);
  return {.num_logical = logical, .num_physical = per_rank * ranks, .num_ranks = ranks};
}

std::vector<int64_t> any_loads(int64_t num_experts) {
  return *rc::gen::container<std::vector<int64_t>>(static_cast<size_t>(num_experts),
                                                   rc::gen::inRange<int64_t>(0, 1000));
}

void check_placement(const ExpertPlacement& placement) {
  const PlacementShape& shape = placement.shape();
  RC_ASSERT(std::ssize(placement.logical_of()) == shape.num_physical);
  int64_t num_replicas = 0;
  for (int64_t e = 0; e < shape.num_logical; ++e) {
    const auto replicas = placement.replicas(e);
    RC_ASSERT(!replicas.empty());
    RC_ASSERT(std::ranges::is_sorted(replicas));
    for (const int32_t p : replicas) RC_ASSERT(placement.logical(p) == e);
    num_replicas += std::ssize(replicas);
  }
  RC_ASSERT(num_replicas == shape.num_physical);
}

RC_GTEST_PROP(ExpertBalance, EveryExpertHasAReplicaAndTheBusiestRankHasNoMoreThanTrivially, ()) {
  const PlacementShape shape = any_shape();
  const std::vector<int64_t> loads = any_loads(shape.num_logical);
  const ExpertPlacement balanced = balance_experts(loads, shape), trivial = ExpertPlacement::trivial(shape);
  check_placement(balanced);
  check_placement(trivial);
  RC_ASSERT(imbalance(loads, balanced) <= imbalance(loads, trivial));
  RC_ASSERT(balance_experts(loads, shape) == balanced);
  const std::vector<double> of_ranks = rank_loads(loads, balanced);
  const double total = std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0);
  const auto expected = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
  RC_ASSERT(std::fabs(total - expected) <= 1e-9 * (1 + expected));
}

RC_GTEST_PROP(ExpertBalance, TablesChooseOwnReplicasFirstAndAllOthersInTurn, ()) {
  const PlacementShape shape = any_shape();
  const ExpertPlacement placement = balance_experts(any_loads(shape.num_logical), shape);
  const int rank = *rc::gen::inRange(0, shape.num_ranks);
  const ReplicaTable table = placement.table_of(rank);
  RC_ASSERT(std::ssize(table.replicas) <= shape.num_physical);
  for (int32_t e = 0; e < shape.num_logical; ++e) {
    std::set<int32_t> own, all, chosen;
    for (int32_t p = 0; p < shape.num_physical; ++p) {
      if (placement.logical(p) != e) continue;
      all.insert(p);
      if (shape.rank_of(p) == rank) own.insert(p);
    }
    for (int64_t row = 0; row < shape.num_physical; ++row) chosen.insert(table.replica_of(e, row));
    RC_ASSERT(chosen == (own.empty() ? all : own));
  }
}

RC_GTEST_PROP(ExpertBalance, ARebalanceKeepsPlacesAndDoesNotMoveWithoutAGain, ()) {
  const PlacementShape shape = any_shape();
  const std::vector<int64_t> loads = any_loads(shape.num_logical);
  const ExpertPlacement before = balance_experts(any_loads(shape.num_logical), shape);
  const ExpertPlacement after = rebalance_experts(loads, before);
  check_placement(after);
  RC_ASSERT(imbalance(loads, after) <= imbalance(loads, before));
  RC_ASSERT(rebalance_experts(loads, after) == after);
  // An expert that stays on its rank is in one of its old places there.
  const int64_t count = shape.experts_per_rank();
  for (int64_t p = 0; p < shape.num_physical; ++p) {
    if (after.logical(p) == before.logical(p)) continue;
    const auto old_rank =
        before.logical_of().subspan(static_cast<size_t>(p / count * count), static_cast<size_t>(count));
    const auto new_rank =
        after.logical_of().subspan(static_cast<size_t>(p / count * count), static_cast<size_t>(count));
    RC_ASSERT(std::ranges::count(new_rank, after.logical(p)) > 0);
    RC_ASSERT(std::ranges::count(old_rank, after.logical(p)) <
              std::ranges::count(new_rank, after.logical(p)));
  }
}

TEST(ExpertBalance, ZipfRowsSpreadToWithinATenthOfTheMean) {
  for (const int ranks : {2, 4, 8})
    for (uint32_t seed = 0; seed < 20; ++seed) {
      const PlacementShape shape = {.num_logical = 32, .num_physical = 32 + 2 * ranks, .num_ranks = ranks};
      const std::vector<int64_t> loads = zipf_loads(32, 1, seed);
      const ExpertPlacement balanced = balance_experts(loads, shape);
      const std::vector<int64_t> rows = routed_rows(loads, balanced);
      const auto total = static_cast<double>(std::accumulate(rows.begin(), rows.end(), int64_t{0}));
      EXPECT_LE(static_cast<double>(std::ranges::max(rows)) * ranks / total, 1.1)
          << ranks << " ranks, seed " << seed;
      const std::vector<double> expected = rank_loads(loads, balanced);
      for (size_t r = 0; r < rows.size(); ++r)  // each source has all of `loads`
        EXPECT_NEAR(static_cast<double>(rows[r]), expected[r] * ranks, 32.0 * ranks);
    }
}

TEST(ExpertBalance, ReplicasOfAnExpertAreOnDifferentRanks) {
  const PlacementShape shape = {.num_logical = 8, .num_physical = 16, .num_ranks = 4};
  std::vector<int64_t> loads(8, 1);
  loads[3] = 1000;
  const ExpertPlacement placement = balance_experts(loads, shape);
  std::set<int> ranks;
  for (const int32_t p : placement.replicas(3)) ranks.insert(shape.rank_of(p));
  EXPECT_EQ(ranks.size(), 4u);
}

TEST(ExpertPlacement, RefusesWrongMaps) {
  const PlacementShape shape = {.num_logical = 3, .num_physical = 4, .num_ranks = 2};
  const auto message = [&](std::vector<int32_t> map) {
    return ExpertPlacement::make(shape, std::move(map)).status().message();
  };
  EXPECT_EQ(message({0, 1, 2}), "3 physical experts; legal: 4");
  EXPECT_EQ(message({0, 1, 2, 3}), "physical expert 3 is expert 3; legal: 0 to 2");
  EXPECT_EQ(message({0, 1, 2, -1}), "physical expert 3 is expert -1; legal: 0 to 2");
  EXPECT_EQ(message({0, 1, 1, 0}), "expert 2 is on no rank");
  EXPECT_TRUE(ExpertPlacement::make(shape, {2, 1, 0, 2}).ok());
}

}  // namespace
}  // namespace fp4moe
