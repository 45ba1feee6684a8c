// Experts placed by load on GPU ranks, which share one GPU or have one each: placements and moves change no
// output of deterministic inference, in graphs too.
#include <gtest/gtest.h>

#include <cstdlib>

#include "engine/speculative_crowd.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "8", 0);
  return true;
}();

EngineConfig flags_of(const char* model, int tp, bool graphs) {
  EngineConfig flags = config_of(model);
  flags.device = "cuda";
  flags.tp_size = tp;
  flags.moe_a2a_backend = "deepep";
  flags.enable_deterministic_inference = true;
  flags.disable_cuda_graph = !graphs;
  flags.comm_timeout = 20;
  return flags;
}

EngineConfig placed(EngineConfig flags) {
  flags.ep_num_redundant_experts = 2 * flags.tp_size;
  flags.enable_eplb = true;
  flags.eplb_rebalance_num_iterations = 0;
  return flags;
}

class GpuPlaced : public testing::TestWithParam<const char*> {};

TEST_P(GpuPlaced, ARebalanceAfterEachStepChangesNoOutput) {
  for (const auto& [tp, graphs] : {std::pair{1, true}, {2, false}, {2, true}, {4, true}}) {
    SCOPED_TRACE(testing::Message() << "tp " << tp << (graphs ? " graphs" : ""));
    const Crowd plain = run_crowd(flags_of(GetParam(), tp, graphs));
    ASSERT_EQ(plain.outputs.size(), 32u);
    EngineConfig moving = placed(flags_of(GetParam(), tp, graphs));
    moving.eplb_rebalance_num_iterations = 1;
    EXPECT_EQ(run_crowd(moving).outputs, plain.outputs);
  }
}

TEST_P(GpuPlaced, ARebalanceUnderLoadEvensOutTheRanks) {
  const Crowd plain = run_crowd(flags_of(GetParam(), 2, true));
  ASSERT_EQ(plain.outputs.size(), 32u);
  const auto engine = make_engine(placed(flags_of(GetParam(), 2, true)));
  ASSERT_NE(engine, nullptr);
  std::vector<std::future<Output>> crowd;
  for (Request& request : requests(*engine)) crowd.push_back(submit(*engine, std::move(request)));
  crowd[0].wait();
  const Result<ExpertMoves> moves = engine->rebalance_experts();
  ASSERT_TRUE(is_ok(moves.status()));
  EXPECT_GT(moves->num_experts, 0);
  EXPECT_LE(moves->imbalance_after, 1.1);
  for (size_t i = 1; i < crowd.size(); ++i) EXPECT_EQ(crowd[i].get(), plain.outputs[i]) << "request " << i;
}

INSTANTIATE_TEST_SUITE_P(Demos, GpuPlaced, testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         demo_name);

}  // namespace
}  // namespace fp4moe
