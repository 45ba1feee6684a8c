#include <gtest/gtest.h>

#include "device/device.h"
#include "device/device_info.h"

namespace fp4moe {
namespace {

TEST(DeviceTest, Resolves) {
  EXPECT_EQ(resolve_device("cpu", 0)->kind, DeviceKind::kCpu);
  EXPECT_EQ(resolve_device("auto", 0)->kind, device_info(0).ok() ? DeviceKind::kCuda : DeviceKind::kCpu);
  if (!device_info(0).ok()) {
    EXPECT_EQ(resolve_device("cuda", 0).status().message(),
              "device=cuda: " + device_info(0).status().message() + "; nearest legal choice: --device cpu");
  }
  EXPECT_EQ(resolve_device("tpu", 0).status().message(), "unknown device 'tpu'; legal: auto, cpu, cuda");
}

TEST(DeviceTest, CapabilitiesAreMajorAndMinor) {
  EXPECT_EQ(compute_capability_text(90), "9.0");
  EXPECT_EQ(compute_capability_text(86), "8.6");
  EXPECT_EQ(compute_capability_text(120), "12.0");
}

}  // namespace
}  // namespace fp4moe
