#include "device/device_info.h"

#include <gtest/gtest.h>

#include "base/buffer.h"
#include "device/cuda_probe.h"
#include "device/device_context.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/graph.h"
#include "device/pinned_memory.h"

namespace fp4moe {
namespace {

DeviceFacts good_machine() {
  return {.num_devices = 1,
          .driver_version = 13000,
          .runtime_version = 13000,
          .driver_too_old = false,
          .error = "",
          .device = {.name = "NVIDIA H200", .compute_capability = 90}};
}

TEST(DeviceInfoTest, VersionsAreMajorAndMinor) {
  EXPECT_EQ(cuda_version_text(13000), "13.0");
  EXPECT_EQ(cuda_version_text(12040), "12.4");
}

TEST(DeviceInfoTest, AcceptsAmpereAndNewer) {
  DeviceFacts facts = good_machine();
  EXPECT_TRUE(check_device(facts).ok());
  facts.device.compute_capability = 80;
  EXPECT_TRUE(check_device(facts).ok());
  facts.driver_version = 12080;  // the runtime accepts drivers older than itself
  EXPECT_TRUE(check_device(facts).ok());
}

TEST(DeviceInfoTest, SaysWhatIsMissing) {
  DeviceFacts facts = good_machine();
  facts.driver_version = 0;
  facts.driver_too_old = true;  // the runtime also reports this without a driver
  EXPECT_EQ(check_device(facts).code(), StatusCode::kUnsupported);
  EXPECT_EQ(check_device(facts).message(), "no NVIDIA driver on this machine (libcuda.so.1 was not found)");

  facts.driver_version = 11080;
  EXPECT_EQ(check_device(facts).message(),
            "the NVIDIA driver supports CUDA 11.8, but this build was made with CUDA 13.0: update the "
            "driver, or build with an older toolkit (12.4 or newer)");

  facts = good_machine();
  facts.num_devices = 0;
  EXPECT_EQ(check_device(facts).message(),
            "the NVIDIA driver reports no device (is CUDA_VISIBLE_DEVICES set?)");

  facts = good_machine();
  facts.error = "system not yet initialized";
  EXPECT_EQ(check_device(facts).message(), "no usable CUDA device: system not yet initialized");

  facts = good_machine();
  facts.num_devices = 2;
  for (const int ordinal : {-1, 2, 7}) {
    facts.ordinal = ordinal;
    EXPECT_EQ(check_device(facts).code(), StatusCode::kUnsupported);
    EXPECT_EQ(check_device(facts).message(),
              "no GPU " + std::to_string(ordinal) + ": the NVIDIA driver reports 2; legal ordinals: 0 to 1");
  }
  facts.ordinal = 1;
  EXPECT_TRUE(check_device(facts).ok());

  facts = good_machine();
  facts.device = {.name = "Tesla V100", .compute_capability = 70};
  EXPECT_EQ(check_device(facts).message(),
            "Tesla V100 has compute capability 7.0, but only 8.0 (Ampere) or newer is supported");
  EXPECT_EQ(check_device(facts).code(), StatusCode::kUnsupported);
}

TEST(DeviceInfoTest, DescriptionIsTheDeviceOrTheReason) {
  const auto info = device_info(0);
  const std::string text = describe_cuda(0);
  if (info.ok()) {
    EXPECT_EQ(text.rfind(info->name + ", sm_", 0), 0u) << text;
  } else {
    EXPECT_EQ(text, info.status().message());
  }
}

// On a machine without a GPU every device function returns an error with the reason.
TEST(DeviceInfoTest, WithoutADeviceEverythingIsRefused) {
  if (device_info(0).ok()) GTEST_SKIP() << "this machine has a GPU";
  const Status context = DeviceContext::of(0).status();
  EXPECT_EQ(context.code(), StatusCode::kUnsupported);
  EXPECT_EQ(context.message(), device_info(0).status().message());
  EXPECT_EQ(DeviceContext::current(), nullptr);
  const Status stream = Stream::make().status();
  EXPECT_EQ(stream.code(), StatusCode::kUnsupported);
  EXPECT_EQ(stream.message(), no_current_device().message());
  EXPECT_EQ(device_memory_info(0).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(Event::make().status().code(), StatusCode::kUnsupported);
  EXPECT_FALSE(Buffer::make(64, device_memory()).ok());
  EXPECT_EQ(Buffer::make(64, pinned_memory()).status().code(), StatusCode::kUnsupported);
  Stream none;
  EXPECT_FALSE(Graph::capture(none, [] { return Status(); }).ok());
  EXPECT_TRUE(Graph().empty());
}

TEST(DeviceInfoTest, PinnedMemoryIsHostMemory) {
  EXPECT_TRUE(pinned_memory().is_host());
  int from = 7, to = 0;
  EXPECT_TRUE(pinned_memory().upload(&to, &from, sizeof to).ok());
  EXPECT_EQ(to, 7);
  from = 9;
  EXPECT_TRUE(pinned_memory().download(&to, &from, sizeof to).ok());
  EXPECT_EQ(to, 9);
}

}  // namespace
}  // namespace fp4moe
