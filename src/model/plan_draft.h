// DraftPlan: how the draft model of a speculative algorithm runs, decided and checked before any weight is
// read.
#pragma once

#include <memory>
#include <string>

#include "model/draft_models.h"
#include "model/plan_model.h"

namespace fp4moe {

struct DraftPlan {
  DraftAlgorithm algorithm = DraftAlgorithm::kStandalone;
  std::string folder;         // of its checkpoint; empty: the target's
  ModelConfig config;         // of its KV pages and vocabulary
  ModelPlan plan;             // plan.flags: the target's, as far as they apply
  FeatureOptions features;    // what the target keeps for it; empty: it takes tokens alone
  int64_t num_input_ids = 0;  // its batches' token ids are below this
  int64_t max_positions = 0;  // its batches' positions are below this
};

// Returns null if the flags of `plan` name no algorithm with a draft model. `target` and `plan`: of the
// target. The draft's ranks are the target's; they exchange rows with --moe-a2a-backend none, and its experts
// run with the default runner and numerics. Errors name --speculative-algorithm or the draft's folder.
Result<std::shared_ptr<const DraftPlan>> plan_draft(const ModelConfig& target, const ModelPlan& plan);

// Whether the draft model is the target's MTP layer.
inline bool drafts_with_mtp(const ModelPlan& plan) {
  return plan.draft != nullptr && plan.draft->algorithm == DraftAlgorithm::kMtp;
}

}  // namespace fp4moe
