// Fused sums of a whole model: demo checkpoints on two GPUs, with and without them. Skipped unless each rank
// has a GPU of its own.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/demo_engine.h"
#include "engine/ranks/growing_drafts.h"

namespace fp4moe {
namespace {

constexpr const char* kGptOss = "demo-gptoss-mxfp4";
constexpr const char* kDeepSeek = "demo-dsv3-nvfp4";

EngineConfig flags_of(int tp, int ep, bool graphs) {
  EngineConfig flags;
  flags.device = "cuda";
  flags.tp_size = tp;
  flags.ep_size = ep;
  flags.disable_cuda_graph = !graphs;
  flags.comm_timeout = 20;
  return flags;
}

// The model's ranks, with or without fused sums.
Growing load(const char* model, const EngineConfig& flags, bool fused) {
  setenv("FP4MOE_TRIAL", fused ? "gpu-fused-sums" : "", 1);
  return {model, flags};
}

class GpuFusedSums : public testing::TestWithParam<int> {  // expert-parallel ranks, of 2
  void SetUp() override {
    if (ranks_per_gpu() > 1) GTEST_SKIP() << "ranks that share a GPU do not fuse sums";
    if (!device_info(1).ok()) GTEST_SKIP() << "needs two GPUs";
  }
};
INSTANTIATE_TEST_SUITE_P(Ep, GpuFusedSums, testing::Values(1, 2));

// With a sum of experts, the norm runs in the kernel of the projections, as on one GPU, and not in that of
// the sum. So the last bits change, which shows that sums were fused.
TEST_P(GpuFusedSums, OfAttentionAndExpertsChangeOnlyTheLastBits) {
  Growing fused = load(kGptOss, flags_of(2, GetParam(), true), true),
          plain = load(kGptOss, flags_of(2, GetParam(), true), false),
          one = load(kGptOss, flags_of(1, 1, true), false);
  Logits a = fused.step(kPrompts), b = plain.step(kPrompts), c = one.step(kPrompts);
  EXPECT_EQ(a, b) << "a step of many rows";
  bool differs = false;
  for (int i = 0; i < 12; ++i) {
    const auto next = best_of(b);
    a = fused.step(next), b = plain.step(next), c = one.step(next);
    differs |= a != b;
    EXPECT_LT(sorted_errors(a, b)[1], 2e-2) << "step " << i;
    EXPECT_LT(sorted_errors(a, c)[1], 2e-2) << "step " << i;
    EXPECT_LT(sorted_errors(a, b)[2], 1.0) << "step " << i;
  }
  EXPECT_TRUE(differs);
}

// The model has a shared expert, so only the sums of attention's outputs are fused. The router's kernel norms
// in both cases.
TEST_P(GpuFusedSums, OfAttentionAloneKeepAllBits) {
  Growing fused = load(kDeepSeek, flags_of(2, GetParam(), true), true),
          plain = load(kDeepSeek, flags_of(2, GetParam(), true), false);
  Logits a = fused.step(kPrompts), b = plain.step(kPrompts);
  for (int i = 0; i < 12; ++i) {
    ASSERT_EQ(a, b) << "step " << i;
    const auto next = best_of(b);
    a = fused.step(next), b = plain.step(next);
  }
}

TEST_P(GpuFusedSums, AreTheSameInGraphs) {
  for (const char* model : {kGptOss, kDeepSeek}) {
    Growing recorded = load(model, flags_of(2, GetParam(), true), true),
            launched = load(model, flags_of(2, GetParam(), false), true);
    Logits a = recorded.step(kPrompts), b = launched.step(kPrompts);
    for (int i = 0; i < 6; ++i) {
      ASSERT_EQ(a, b) << model << ", step " << i;
      const auto next = best_of(a);
      a = recorded.step(next), b = launched.step(next);
    }
  }
}

// Steps of 2 to 12 rows: fused and other sums follow each other.
TEST_P(GpuFusedSums, FollowStepsOfMoreRows) {
  Growing recorded = load(kGptOss, with_drafts(flags_of(2, GetParam(), true)), true),
          launched = load(kGptOss, with_drafts(flags_of(2, GetParam(), false)), true);
  expect_equal_bits_with_drafts(recorded, launched);
}

}  // namespace
}  // namespace fp4moe
