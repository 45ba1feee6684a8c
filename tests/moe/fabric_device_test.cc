#include <gtest/gtest.h>

#include "comm/fabric.h"
#include "device/cuda_probe.h"
#include "device/device.h"

namespace fp4moe {
namespace {

TEST(FabricTest, OneRankIsLocal) {
  for (const char* name : {"auto", "local"}) {
    const Result<Fabric> fabric = make_fabric(name, 1);
    ASSERT_TRUE(fabric.ok()) << fabric.status().to_string();
    EXPECT_STREQ(fabric->name, "local");
    EXPECT_EQ(fabric->rank, 0);
    EXPECT_EQ(fabric->num_ranks, 1);
  }
}

TEST(FabricTest, RefusalsNameTheValueAndTheNearestLegalChoice) {
  const auto message = [](const char* name, int ranks, StatusCode code) {
    const Result<Fabric> fabric = make_fabric(name, ranks);
    EXPECT_FALSE(fabric.ok());
    EXPECT_EQ(fabric.status().code(), code);
    return fabric.status().message();
  };
  EXPECT_EQ(message("threads", 1, StatusCode::kUnsupported),
            "fabric=threads is not built in this version; nearest legal choice: --fabric local");
  EXPECT_EQ(message("mpi", 1, StatusCode::kUnsupported),
            "fabric=mpi is not built in this version; nearest legal choice: --fabric local");
  EXPECT_EQ(message("local", 2, StatusCode::kUnsupported),
            "fabric=local carries 1 rank, but tp=2 asks for 2; nearest legal choice: --tp 1");
  EXPECT_EQ(message("auto", 2, StatusCode::kUnsupported),
            "fabric=auto: no fabric built in this version carries tp=2 ranks; nearest legal choice: --tp 1");
  EXPECT_EQ(message("nccl", 1, StatusCode::kInvalidArgument),
            "unknown fabric 'nccl': auto, local, threads or mpi");
  EXPECT_EQ(message("local", 0, StatusCode::kInvalidArgument), "fabric: num_ranks=0 must be at least 1");
}

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
