// The ranks of the demos with their trained draft models.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/ranks/growing.h"
#include "engine/startup/draft_checkpoint.h"
#include "engine/trained_drafts.h"
#include "model/plan_draft.h"

namespace fp4moe {

// options.max_logit_rows: requests of a group.
struct TrainedRanks {
  TrainedRanks(const TrainedDraft& drafter, EngineConfig flags, RankGroupOptions options) {
    flags = with_trained_drafts(std::move(flags), drafter);
    flags.model_path = models() + "/" + drafter.model;
    if (!flags.speculative_draft_model_path.empty())
      flags.speculative_draft_model_path = models() + "/" + drafter.draft;
    config = load_model_config(flags.model_path).value();
    Result<ModelPlan> planned = plan_model(config, flags);
    if (!planned.ok()) throw std::runtime_error(planned.status().to_string());
    ModelPlan plan = std::move(*planned);
    plan.draft = plan_draft(config, plan).value();
    const Checkpoint target = Checkpoint::open(flags.model_path).value();
    const std::optional<Checkpoint> draft = open_draft(plan.draft.get(), config, "auto").value();
    num_rows = rows_per_request(plan.flags);
    options.max_logit_rows *= num_rows * plan.moe.problem().layout.dp;
    auto made = RankGroup::make(target, config, plan, plan.flags, options, draft ? &*draft : nullptr);
    if (!made.ok()) throw std::runtime_error(made.status().to_string());
    ranks = std::move(*made);
  }
  ModelConfig config;
  int64_t num_rows = 0;  // of a decoding sequence
  std::unique_ptr<RankGroup> ranks;
};

}  // namespace fp4moe
