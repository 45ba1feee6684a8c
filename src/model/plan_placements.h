// The placement of the experts with which a model is loaded.
#pragma once

#include <memory>
#include <string>

#include "io/config/model_config.h"
#include "model/plan_model.h"
#include "moe/placement/expert_placement.h"

namespace fp4moe {

// location: --init-expert-location: trivial, or what read_expert_location() accepts. Loads are balanced.
// Null if the plan places no experts. Errors name the flag.
Result<std::shared_ptr<const ExpertPlacements>> plan_placements(const ModelConfig& config,
                                                                const MoePlan& plan,
                                                                const std::string& location);

// Describes the placements as ", ..." with a hash of them; empty without placements.
std::string placements_text(const ModelPlan& plan);

}  // namespace fp4moe
