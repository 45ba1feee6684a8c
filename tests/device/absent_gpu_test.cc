#include "device/absent_gpu.h"

#include <gtest/gtest.h>

#include <limits>

namespace fp4moe {
namespace {

TEST(AbsentGpu, HasTheMemoryOfItsName) {
  const AbsentGpu h200 = absent_gpu("h200", 0).value();
  EXPECT_EQ(h200.compute_capability, 90);
  EXPECT_EQ(h200.memory_bytes, int64_t{143771} << 20);
  EXPECT_EQ(absent_gpu("h100", 0)->memory_bytes, int64_t{81559} << 20);
}

TEST(AbsentGpu, TakesAnotherMemory) {
  EXPECT_EQ(absent_gpu("h100", 96)->memory_bytes, int64_t{96} << 30);
  const AbsentGpu other = absent_gpu("sm_90", 23.5).value();
  EXPECT_EQ(other.compute_capability, 90);
  EXPECT_EQ(other.memory_bytes, int64_t{47} << 29);
}

TEST(AbsentGpu, RefusesWhatItDoesNotKnow) {
  for (const char* name : {"", "b200", "H200", "sm_", "sm_9x", "sm_89", "sm_100", "sm_-90", "sm_99999999999"})
    EXPECT_EQ(absent_gpu(name, 80).status().code(), StatusCode::kInvalidArgument) << name;
  EXPECT_EQ(absent_gpu("b200", 0).status().message(),
            "--gpu b200; legal: " + absent_gpu_names() + ", or sm_90 with --gpu-memory");
  EXPECT_EQ(absent_gpu("sm_90", 0).status().message(), "--gpu sm_90 needs --gpu-memory, in GiB");
  for (const double gib : {-1.0, 4097.0, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(absent_gpu("h200", gib).status().code(), StatusCode::kInvalidArgument) << gib;
}

TEST(AbsentGpu, IsChosenInPlaceOfThisMachines) {
  const DeviceChoice choice = choose_device("auto", absent_gpu("h100", 0).value()).value();
  EXPECT_EQ(choice.kind, DeviceKind::kCuda);
  EXPECT_EQ(choice.compute_capability, 90);
  EXPECT_EQ(choose_device("cpu", absent_gpu("h100", 0).value()).status().message(),
            "--device cpu contradicts --gpu");
  EXPECT_EQ(choose_device("cpu", {})->kind, DeviceKind::kCpu);
}

}  // namespace
}  // namespace fp4moe
