// ExpertPlacement: which experts of a layer each rank has. The routers choose logical experts, those of the
// checkpoint; a physical expert is a copy of one of them on one rank. A logical expert has at least one
// physical expert, its replicas, and rows for it go to one of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct PlacementShape {
  int64_t num_logical = 0;   // E
  int64_t num_physical = 0;  // E plus the redundant experts; a multiple of num_ranks
  int num_ranks = 1;         // rank r has the num_physical / num_ranks physical experts from r times that on

  int64_t experts_per_rank() const { return num_physical / num_ranks; }
  int rank_of(int64_t physical) const { return static_cast<int>(physical / experts_per_rank()); }
};

// The physical experts to which one rank sends its rows, as arrays that kernels can read.
struct ReplicaTable {
  std::vector<int32_t> first;     // [E + 1]: expert e has the entries [first[e], first[e + 1])
  std::vector<int32_t> replicas;  // at most num_physical
  int32_t rank = 0;

  // The choice for row `row` of the rank's rows. Consecutive rows take the replicas in turn, and ranks and
  // experts start at different ones.
  int32_t replica_of(int32_t expert, int64_t row) const {
    const int32_t begin = first[static_cast<size_t>(expert)];
    const int64_t count = first[static_cast<size_t>(expert) + 1] - begin;
    return replicas[static_cast<size_t>(begin + (row + expert + rank) % count)];
  }
};

class ExpertPlacement {
 public:
  ExpertPlacement() = default;
  // Physical expert p is a copy of logical expert p % E.
  static ExpertPlacement trivial(const PlacementShape& shape);
  // logical_of [num_physical]: the logical expert of each physical one. kInvalidArgument: a wrong length, an
  // id outside [0, E), or an expert without a replica.
  static Result<ExpertPlacement> make(const PlacementShape& shape, std::vector<int32_t> logical_of);

  const PlacementShape& shape() const { return shape_; }
  std::span<const int32_t> logical_of() const { return logical_of_; }
  int32_t logical(int64_t physical) const { return logical_of_[static_cast<size_t>(physical)]; }
  // The physical experts of a logical one, ascending.
  std::span<const int32_t> replicas(int64_t logical) const;
  // The replicas on `rank`; all replicas if `rank` has none.
  std::span<const int32_t> replicas_for(int64_t logical, int rank) const;
  ReplicaTable table_of(int rank) const;

  bool operator==(const ExpertPlacement& other) const { return logical_of_ == other.logical_of_; }

 private:
  PlacementShape shape_;
  std::vector<int32_t> logical_of_;  // [num_physical]
  std::vector<int32_t> first_;       // [E + 1]: where a logical expert's replicas start
  std::vector<int32_t> replicas_;    // [num_physical]
};

using ExpertPlacements = std::vector<ExpertPlacement>;  // one for each layer of a model

}  // namespace fp4moe
