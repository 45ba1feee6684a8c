#include <gtest/gtest.h>

#include "device/cuda_probe.h"
#include "device/device.h"

namespace fp4moe {
namespace {

TEST(DeviceTest, Resolves) {
  EXPECT_EQ(*resolve_device("auto"), DeviceKind::kCpu);
  EXPECT_EQ(*resolve_device("cpu"), DeviceKind::kCpu);
  EXPECT_EQ(resolve_device("cuda").status().message(), "device=cuda: this version has no CUDA kernels (" +
                                                           describe_cuda() +
                                                           "); nearest legal choice: --device cpu");
  EXPECT_EQ(resolve_device("tpu").status().message(), "unknown device 'tpu': auto, cpu or cuda");
}

}  // namespace
}  // namespace fp4moe
