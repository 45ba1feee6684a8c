// Tests that the tables of a GPU's MoE ops are complete. Runs without a GPU.
#include "kernels/device_moe.h"

#include <gtest/gtest.h>

#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace {

TEST(DeviceMoeOpsTest, EveryTableHasEveryOp) {
  for (const DeviceMoeOps* ops :
       {sm90_moe_ops(), sm90_fp8_moe_ops(), sm90_bf16_moe_ops(), fallback_moe_ops()}) {
    if (ops == nullptr) GTEST_SKIP() << "built without CUDA";
    SCOPED_TRACE(ops->name);
    EXPECT_TRUE(ops->sort != nullptr && ops->gate_up != nullptr && ops->down != nullptr &&
                ops->combine != nullptr);
    EXPECT_TRUE(ops->default_tactic != nullptr);
    EXPECT_TRUE(ops->route != nullptr && ops->route_fuses_norm != nullptr && ops->route_sends != nullptr);
    EXPECT_TRUE(ops->quantize != nullptr);
    EXPECT_EQ(ops->linear_fits != nullptr, ops->linear != nullptr);
    ASSERT_FALSE(ops->tactics.empty());
    for (const DeviceMoeTactic& tactic : ops->tactics)
      EXPECT_TRUE(tactic.name != nullptr && tactic.fits != nullptr && tactic.layer != nullptr &&
                  tactic.workspace_bytes != nullptr);
  }
}

}  // namespace
}  // namespace fp4moe
