// Processes that share a GPU are refused by name.
#include "device/gpu_uuid.h"

#include <gtest/gtest.h>

#include <vector>

namespace fp4moe {
namespace {

GpuUuid uuid(uint8_t first) {
  GpuUuid id;
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(first + 17 * i);
  return id;
}

TEST(GpuUuidTest, TextIsThatOfNvidiaSmi) {
  EXPECT_EQ(gpu_uuid_text(uuid(0)), "GPU-00112233-4455-6677-8899-aabbccddeeff");
}

TEST(GpuUuidTest, EachProcessNeedsItsOwnGpu) {
  EXPECT_TRUE(check_own_gpus({}).ok());
  EXPECT_TRUE(check_own_gpus(std::vector{uuid(1)}).ok());
  EXPECT_TRUE(check_own_gpus(std::vector{uuid(1), uuid(2), uuid(3)}).ok());
  const Status status = check_own_gpus(std::vector{uuid(1), uuid(0), uuid(2), uuid(0)});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(
      status.message(),
      "ranks 1 and 3 have the same GPU, GPU-00112233-4455-6677-8899-aabbccddeeff, but each process needs its "
      "own (--fabric mpi); nearest legal choice: start each process with CUDA_VISIBLE_DEVICES set to its "
      "number on the host, as docs/fabrics.md shows");
}

}  // namespace
}  // namespace fp4moe
