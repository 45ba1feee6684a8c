// Both demo checkpoints on several ranks that share one GPU or have one each: tensor and expert parallelism
// against one rank, recorded against launched steps, and refused combinations.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "engine/demo_engine.h"
#include "engine/ranks/growing.h"

namespace fp4moe {
namespace {

// Read when the first GPU is used.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 1);
  return true;
}();

struct Case {
  const char* model;
  int tp, ep;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  std::string name = std::string(info.param.model) + "_tp" + std::to_string(info.param.tp) + "_ep" +
                     std::to_string(info.param.ep);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

EngineConfig flags_of(const Case& c, bool graphs) {
  EngineConfig flags;
  flags.device = "cuda";
  flags.tp_size = c.tp;
  flags.ep_size = c.ep;
  flags.disable_cuda_graph = !graphs;
  flags.comm_timeout = 20;
  return flags;
}

class GpuGroups : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Layouts, GpuGroups,
                         testing::Values(Case{"demo-gptoss-mxfp4", 2, 1}, Case{"demo-gptoss-mxfp4", 2, 2},
                                         Case{"demo-gptoss-mxfp4", 4, 1}, Case{"demo-gptoss-mxfp4", 4, 4},
                                         Case{"demo-dsv3-nvfp4", 2, 1}, Case{"demo-dsv3-nvfp4", 2, 2},
                                         Case{"demo-dsv3-nvfp4", 4, 1}, Case{"demo-dsv3-nvfp4", 4, 4}),
                         case_name);

TEST_P(GpuGroups, ComputeWhatOneRankComputes) {
  Growing one(GetParam().model, flags_of({GetParam().model, 1, 1}, true)),
      group(GetParam().model, flags_of(GetParam(), true));
  Logits expected = one.step(kPrompts), actual = group.step(kPrompts);
  for (int i = 0; i < 8; ++i) {
    const std::vector<double> errors = sorted_errors(actual, expected);
    EXPECT_LT(errors[1], 2e-2) << "step " << i;
    EXPECT_LT(errors[2], 1.0) << "step " << i;
    const auto next = best_of(expected);
    expected = one.step(next);
    actual = group.step(next);
  }
}

TEST_P(GpuGroups, RecordedStepsHaveTheBitsOfLaunchedOnes) {
  Growing recorded(GetParam().model, flags_of(GetParam(), true)),
      launched(GetParam().model, flags_of(GetParam(), false));
  Logits a = recorded.step(kPrompts), b = launched.step(kPrompts);
  for (int i = 0; i < 6; ++i) {
    ASSERT_EQ(a, b) << "step " << i;
    const auto next = best_of(a);
    a = recorded.step(next);
    b = launched.step(next);
  }
}

TEST(GpuGroups, RefuseWhatTheyCannotDo) {
  const auto refused = [](const char* what, const auto& change) {
    EngineConfig flags = flags_of({"demo-gptoss-mxfp4", 2, 1}, true);
    flags.model_path = models() + "/demo-gptoss-mxfp4";
    change(flags);
    const auto plan = plan_model(load_model_config(flags.model_path).value(), flags);
    EXPECT_EQ(plan.status().code(), StatusCode::kUnsupported) << what;
    EXPECT_NE(plan.status().message().find(what), std::string::npos) << plan.status().message();
  };
  refused("dp=2", [](EngineConfig& f) { f.dp_size = 2, f.enable_dp_attention = true; });
  refused("a2a=deepep", [](EngineConfig& f) { f.moe_a2a_backend = "deepep"; });
  refused("enable_deterministic_inference", [](EngineConfig& f) { f.enable_deterministic_inference = true; });
  refused("fabric=mpi", [](EngineConfig& f) { f.fabric = "mpi"; });
  // More ranks than the GPUs of most machines have room for.
  refused("no GPU 1", [](EngineConfig& f) { f.tp_size = 8; });
}

}  // namespace
}  // namespace fp4moe
