#include "moe/placement/expert_placement.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

Status check_logical_of(const PlacementShape& shape, std::span<const int32_t> logical_of) {
  if (std::ssize(logical_of) != shape.num_physical)
    return invalid_argument(std::to_string(logical_of.size()) +
                            " physical experts; legal: " + std::to_string(shape.num_physical));
  std::vector<bool> has(static_cast<size_t>(shape.num_logical));
  for (size_t p = 0; p < logical_of.size(); ++p) {
    const int32_t e = logical_of[p];
    if (e < 0 || e >= shape.num_logical)
      return invalid_argument("physical expert " + std::to_string(p) + " is expert " + std::to_string(e) +
                              "; legal: 0 to " + std::to_string(shape.num_logical - 1));
    has[static_cast<size_t>(e)] = true;
  }
  const auto missing = std::ranges::find(has, false);
  if (missing == has.end()) return {};
  return invalid_argument("expert " + std::to_string(missing - has.begin()) + " is on no rank");
}

}  // namespace

ExpertPlacement ExpertPlacement::trivial(const PlacementShape& shape) {
  std::vector<int32_t> logical_of;
  for (int64_t p = 0; p < shape.num_physical; ++p)
    logical_of.push_back(static_cast<int32_t>(p % shape.num_logical));
  auto placement = make(shape, std::move(logical_of));
  FP4MOE_CHECK(placement.ok(), placement.status().message());
  return std::move(*placement);
}

Result<ExpertPlacement> ExpertPlacement::make(const PlacementShape& shape, std::vector<int32_t> logical_of) {
  FP4MOE_CHECK(shape.num_logical > 0 && shape.num_ranks > 0 && shape.num_physical % shape.num_ranks == 0,
               std::to_string(shape.num_physical) + " physical experts on " +
                   std::to_string(shape.num_ranks) + " ranks");
  FP4MOE_RETURN_IF_ERROR(check_logical_of(shape, logical_of));
  ExpertPlacement placement;
  placement.shape_ = shape;
  placement.first_.assign(static_cast<size_t>(shape.num_logical) + 1, 0);
  for (const int32_t e : logical_of) ++placement.first_[static_cast<size_t>(e) + 1];
  for (size_t e = 1; e < placement.first_.size(); ++e) placement.first_[e] += placement.first_[e - 1];
  placement.replicas_.resize(logical_of.size());
  std::vector<int32_t> next(placement.first_.begin(), placement.first_.end() - 1);
  for (size_t p = 0; p < logical_of.size(); ++p) {
    int32_t& at = next[static_cast<size_t>(logical_of[p])];
    placement.replicas_[static_cast<size_t>(at++)] = static_cast<int32_t>(p);
  }
  placement.logical_of_ = std::move(logical_of);
  return placement;
}

std::span<const int32_t> ExpertPlacement::replicas(int64_t logical) const {
  const auto first = static_cast<size_t>(first_[static_cast<size_t>(logical)]);
  const auto end = static_cast<size_t>(first_[static_cast<size_t>(logical) + 1]);
  return std::span(replicas_).subspan(first, end - first);
}

std::span<const int32_t> ExpertPlacement::replicas_for(int64_t logical, int rank) const {
  const std::span<const int32_t> all = replicas(logical);
  const auto at = [this](int32_t p) { return shape_.rank_of(p); };
  const auto own = std::ranges::equal_range(all, rank, {}, at);
  return own.empty() ? all : std::span<const int32_t>(own.begin(), own.end());
}

ReplicaTable ExpertPlacement::table_of(int rank) const {
  ReplicaTable table{.first = {0}, .replicas = {}, .rank = rank};
  for (int64_t e = 0; e < shape_.num_logical; ++e) {
    const std::span<const int32_t> choices = replicas_for(e, rank);
    table.replicas.insert(table.replicas.end(), choices.begin(), choices.end());
    table.first.push_back(static_cast<int32_t>(table.replicas.size()));
  }
  return table;
}

}  // namespace fp4moe
