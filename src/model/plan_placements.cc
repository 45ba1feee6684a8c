#include "model/plan_placements.h"

#include <sstream>
#include <vector>

#include "base/check.h"
#include "base/hash.h"
#include "io/config/expert_location.h"
#include "moe/placement/expert_balance.h"

namespace fp4moe {
namespace {

Result<ExpertPlacements> read_placements(const ModelConfig& config, const PlacementShape& shape,
                                         const std::string& source) {
  FP4MOE_ASSIGN_OR_RETURN(
      ExpertLocation location,
      read_expert_location(source, {config.num_layers, shape.num_logical, shape.num_physical}));
  ExpertPlacements placements;
  for (const std::vector<int64_t>& loads : location.loads)
    placements.push_back(balance_experts(loads, shape));
  for (std::vector<int32_t>& logical_of : location.logical_of) {
    auto placement = ExpertPlacement::make(shape, std::move(logical_of));
    if (!placement.ok()) return placement.status().with_context("layer " + std::to_string(placements.size()));
    placements.push_back(std::move(*placement));
  }
  return placements;
}

}  // namespace

Result<std::shared_ptr<const ExpertPlacements>> plan_placements(const ModelConfig& config,
                                                                const MoePlan& plan,
                                                                const std::string& location) {
  if (!plan.places_experts()) return std::shared_ptr<const ExpertPlacements>();
  const PlacementShape shape = plan.problem().placement_shape();
  if (location == "trivial")
    return std::make_shared<const ExpertPlacements>(static_cast<size_t>(config.num_layers),
                                                    ExpertPlacement::trivial(shape));
  auto placements = read_placements(config, shape, location);
  if (!placements.ok())
    return placements.status().with_context("--init-expert-location " + location.substr(0, 80));
  return std::make_shared<const ExpertPlacements>(std::move(*placements));
}

std::string placements_text(const ModelPlan& plan) {
  if (plan.placements == nullptr) return "";
  uint64_t hash = 0;
  for (const ExpertPlacement& placement : *plan.placements) {
    const auto logical_of = placement.logical_of();
    hash = hash64(logical_of.data(), static_cast<int64_t>(logical_of.size_bytes()), hash);
  }
  std::ostringstream text;
  text << ", " << plan.moe.problem().num_redundant << " redundant experts, placement " << std::hex << hash;
  return text.str();
}

}  // namespace fp4moe
