// A checkpoint loaded on CPU ranks, for tests that run steps on them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "engine/ranks/rank_group.h"
#include "engine/startup/memory_plan.h"
#include "io/status_matchers.h"

namespace fp4moe {

struct LoadedRanks {
  ModelConfig config;
  ModelPlan plan;
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<RankGroup> ranks;  // null if loading failed
};

// Loads flags.model_path; an error fails the test.
inline LoadedRanks load_ranks(const EngineConfig& flags, const RankGroupOptions& options) {
  LoadedRanks loaded;
  Result<ModelConfig> config = load_model_config(flags.model_path);
  EXPECT_TRUE(is_ok(config.status()));
  loaded.config = *config;
  Result<ModelPlan> plan = plan_model(loaded.config, flags);
  EXPECT_TRUE(is_ok(plan.status()));
  loaded.plan = *plan;
  Result<Checkpoint> checkpoint = Checkpoint::open(flags.model_path);
  EXPECT_TRUE(is_ok(checkpoint.status()));
  loaded.checkpoint = std::make_unique<Checkpoint>(std::move(*checkpoint));
  auto ranks = RankGroup::make(*loaded.checkpoint, loaded.config, loaded.plan, loaded.plan.flags, options);
  EXPECT_TRUE(is_ok(ranks.status()));
  if (ranks.ok()) loaded.ranks = std::move(*ranks);
  return loaded;
}

}  // namespace fp4moe
