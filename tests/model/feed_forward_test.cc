// The routed part of a MoE layer, as each family loads it, is scaled by routed_scaling_factor exactly once;
// the shared expert is not.
#include "model/feed_forward.h"

#include <gtest/gtest.h>

#include <random>

#include "base/check.h"
#include "model/plan_model.h"
#include "model/weight_loader.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Case {
  const char* folder;
  MoeNames names;
};

class ScalingFactor : public testing::TestWithParam<Case> {
 protected:
  // The layer's float32 output for some rows of noise, with the given factor.
  static Result<std::vector<float>> output(double factor) {
    const std::string folder = std::string(FP4MOE_FIXTURES "/") + GetParam().folder;
    EngineConfig flags;
    flags.dtype = "float32";
    FP4MOE_ASSIGN_OR_RETURN(ModelConfig config, load_model_config(folder));
    config.router.scaling_factor = factor;
    FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config, flags));
    FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(folder));
    ThreadPool pool(1);
    const ModelOptions options{
        .act_dtype = plan.act_dtype, .isa = plan.isa, .moe_plan = plan.moe, .max_batch_tokens = kRows};
    const ProgressSink no_progress;
    WeightLoader loader(checkpoint, config, options, pool, no_progress);
    FP4MOE_ASSIGN_OR_RETURN(const auto layer, load_moe(loader, config.num_layers - 1, GetParam().names));
    FP4MOE_ASSIGN_OR_RETURN(const auto transport, make_transport(plan.moe, {.max_group_rows = kRows}));
    FP4MOE_ASSIGN_OR_RETURN(Arena scratch, Arena::make(layer->scratch_bytes(kRows, *transport)));

    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(kRows * config.hidden_size)), out(x.size(), 0.0f);
    for (float& value : x) value = normal(random);
    const ActRows rows = {x.data(), DType::kF32, kRows, config.hidden_size};
    FP4MOE_RETURN_IF_ERROR(layer->forward_moe({0, rows, x.data(), out.data()}, *transport, scratch, pool));
    return out;
  }

  static constexpr int64_t kRows = 9;
};

TEST_P(ScalingFactor, MultipliesTheRoutedPartOnce) {
  const auto none = output(0), once = output(1.5), twice = output(3);
  ASSERT_TRUE(none.ok() && once.ok() && twice.ok()) << none.status().to_string();
  std::vector<float> routed, doubled, routed_times_two;
  for (size_t i = 0; i < none->size(); ++i) {
    routed.push_back((*once)[i] - (*none)[i]);
    doubled.push_back((*twice)[i] - (*none)[i]);
    routed_times_two.push_back(2 * routed.back());
  }
  EXPECT_TRUE(within_relative_l2(doubled, routed_times_two, 1e-5));
  EXPECT_GT(relative_l2(*once, *none), 1e-3) << "the routed part is missing";
  const std::vector<float> zeros(none->size(), 0.0f);
  EXPECT_EQ(*none == zeros, GetParam().names.shared_expert == nullptr)
      << "only the shared expert must remain";
}

INSTANTIATE_TEST_SUITE_P(Families, ScalingFactor,
                         testing::Values(Case{"dsv3_h96_modelopt_yarn",
                                              {.scoring = RouterScoring::kSigmoidGrouped,
                                               .router = "mlp.gate",
                                               .shared_expert = "mlp.shared_experts"}},
                                         Case{"qwen3_h96_fused_old_rope",
                                              {.scoring = RouterScoring::kSoftmaxTopk, .router = "mlp.gate"}},
                                         Case{"qwen2_h64_shared_expert",
                                              {.scoring = RouterScoring::kSoftmaxTopk,
                                               .router = "mlp.gate",
                                               .shared_expert = "mlp.shared_expert",
                                               .shared_gate = "mlp.shared_expert_gate.weight"}},
                                         Case{"h192_i96_yarn",
                                              {.scoring = RouterScoring::kTopkSoftmax,
                                               .router = "mlp.router",
                                               .router_bias = "mlp.router.bias"}}),
                         [](const auto& test) { return std::string(test.param.folder); });

}  // namespace
}  // namespace fp4moe
