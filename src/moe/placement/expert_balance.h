// Chooses a placement from recorded loads: the experts with the most rows are replicated, and the replicas
// are packed so that the busiest rank has as few rows as possible. The idea is that of DeepSeek's expert
// parallelism load balancer (EPLB). Pure arithmetic: equal loads give equal placements.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/placement/expert_placement.h"

namespace fp4moe {

// loads [E] >= 0: rows for each logical expert. The busiest rank has at most the rows that it has with the
// trivial placement.
ExpertPlacement balance_experts(std::span<const int64_t> loads, const PlacementShape& shape);

// Returns `current` unless a balanced placement lowers the busiest rank's rows by more than 1 %. A rank's
// experts that it already has keep their physical experts, so few weights move.
ExpertPlacement rebalance_experts(std::span<const int64_t> loads, const ExpertPlacement& current);

// Expected rows of each rank, if all ranks route equally many tokens alike and choose replicas as
// ReplicaTable does.
std::vector<double> rank_loads(std::span<const int64_t> loads, const ExpertPlacement& placement);

// The busiest rank's rows divided by the mean; 1 without any rows.
double imbalance(std::span<const int64_t> loads, const ExpertPlacement& placement);

}  // namespace fp4moe
