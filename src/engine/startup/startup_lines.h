// The startup screen: what runs where, and why.
#pragma once

#include <string>
#include <vector>

#include "engine/ranks/comm_memory.h"
#include "engine/ranks/rank_group.h"
#include "engine/startup/memory_plan.h"
#include "fp4moe/engine.h"
#include "model/plan_model.h"

namespace fp4moe {

struct StartupFacts {
  const EngineConfig& flags;
  const ModelConfig& model;
  const ModelPlan& plan;
  const MemoryPlan& memory;
  const ModelInfo& info;  // everything except startup_lines
  RankGroup& ranks;
  const CommMemory& comm;
  double load_seconds = 0;
};

std::vector<std::string> startup_lines(const StartupFacts& facts);

}  // namespace fp4moe
