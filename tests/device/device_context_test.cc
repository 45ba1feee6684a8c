// Tests the state of each GPU of this machine. Unless noted, cases for several GPUs also run on one GPU.
#include "device/device_context.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/pinned_memory.h"
#include "device/stream.h"

namespace fp4moe {
namespace {

int num_gpus() {
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  return count;
}

DeviceContext& gpu(int ordinal) { return *DeviceContext::of(ordinal).value(); }

int attribute(cudaDeviceAttr name, int ordinal) {
  int value = -1;
  EXPECT_EQ(cudaDeviceGetAttribute(&value, name, ordinal), cudaSuccess);
  return value;
}

// Returns the calling thread's GPU as reported by the CUDA runtime.
int selected_gpu() {
  int ordinal = -1;
  EXPECT_EQ(cudaGetDevice(&ordinal), cudaSuccess);
  return ordinal;
}

int gpu_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, pointer), cudaSuccess);
  return attributes.device;
}

TEST(DeviceContext, HasTheDriversLimits) {
  for (int i = 0; i < num_gpus(); ++i) {
    const DeviceInfo& info = gpu(i).info();
    EXPECT_EQ(gpu(i).ordinal(), i);
    EXPECT_EQ(info.num_sms, attribute(cudaDevAttrMultiProcessorCount, i));
    EXPECT_EQ(info.shared_bytes_per_block, attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i));
    EXPECT_EQ(info.compute_major(), attribute(cudaDevAttrComputeCapabilityMajor, i));
    EXPECT_EQ(info.compute_capability % 10, attribute(cudaDevAttrComputeCapabilityMinor, i));
    EXPECT_EQ(info.l2_bytes, attribute(cudaDevAttrL2CacheSize, i));
    EXPECT_EQ(info.memory_bytes, device_memory_info(i)->total_bytes);
  }
}

TEST(DeviceContext, IsOneForEachGpu) {
  for (int i = 0; i < num_gpus(); ++i) {
    EXPECT_EQ(&gpu(i), &gpu(i));
    EXPECT_EQ(&gpu(i) == &gpu(0), i == 0);
  }
}

TEST(DeviceContext, AGpuThatDoesNotExistIsRefused) {
  const std::string count = std::to_string(num_gpus()), last = std::to_string(num_gpus() - 1);
  for (const int ordinal : {-1, num_gpus()}) {
    const Status status = DeviceContext::of(ordinal).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_EQ(status.message(), "no GPU " + std::to_string(ordinal) + ": the NVIDIA driver reports " + count +
                                    "; legal ordinals: 0 to " + last);
    EXPECT_EQ(device_memory_info(ordinal).status().message(), status.message());
  }
}

TEST(DeviceContext, PreparesAKernelOnceForEachGpu) {
  const char function = 0;
  std::vector<int> calls(static_cast<size_t>(num_gpus()));
  for (int round = 0; round < 3; ++round)
    for (int i = 0; i < num_gpus(); ++i)
      gpu(i).prepared_kernels().once(&function, [&] { ++calls[static_cast<size_t>(i)]; });
  EXPECT_EQ(calls, std::vector<int>(calls.size(), 1));
}

struct CountedLibrary {
  static inline int num_opened = 0;
  int number = 0;
  Status open() {
    number = ++num_opened;
    return {};
  }
};

struct MissingLibrary {
  static inline int num_opened = 0;
  Status open() {
    ++num_opened;
    return unsupported("missing");
  }
};

TEST(DeviceContext, OpensALibraryOnceForEachGpu) {
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < num_gpus(); ++i) {
      const DeviceScope scope(gpu(i));
      const auto library = current_device().open_library<CountedLibrary>(DeviceLibrary::kLinear);
      ASSERT_TRUE(library.ok());
      EXPECT_EQ((*library)->number, i + 1);
      const auto missing = current_device().open_library<MissingLibrary>(DeviceLibrary::kPeakMatmul);
      EXPECT_EQ(missing.status().message(), "missing");
    }
  EXPECT_EQ(CountedLibrary::num_opened, num_gpus());
  EXPECT_EQ(MissingLibrary::num_opened, num_gpus());
}

TEST(DeviceScope, NestsAndRestoresTheOuterGpu) {
  const int last = num_gpus() - 1;
  const DeviceScope outer(gpu(0));
  {
    const DeviceScope inner(gpu(last));
    EXPECT_EQ(&current_device(), &gpu(last));
    EXPECT_EQ(selected_gpu(), last);
    Stream stream = Stream::make().value();
    EXPECT_EQ(&stream.device(), &gpu(last));
    const DeviceScope innermost(gpu(0));
    EXPECT_EQ(selected_gpu(), 0);
    {
      const StreamScope scope(stream);
      EXPECT_EQ(&current_device(), &gpu(last));
      EXPECT_EQ(selected_gpu(), last);
    }
    EXPECT_EQ(selected_gpu(), 0);
  }
  EXPECT_EQ(&current_device(), &gpu(0));
  EXPECT_EQ(selected_gpu(), 0);
}

TEST(DeviceScope, MakingAContextLeavesTheCurrentGpu) {
  const DeviceScope scope(gpu(0));
  for (int i = 0; i < num_gpus(); ++i) {
    ASSERT_TRUE(DeviceContext::of(i).ok());
    ASSERT_TRUE(device_memory_info(i).ok());
    EXPECT_EQ(&current_device(), &gpu(0));
    EXPECT_EQ(selected_gpu(), 0);
  }
}

TEST(DeviceScope, AThreadWithoutOneIsRefused) {
  std::thread([] {
    EXPECT_EQ(DeviceContext::current(), nullptr);
    const std::string why = no_current_device().message();
    EXPECT_EQ(Stream::make().status().message(), why);
    EXPECT_EQ(Event::make().status().message(), why);
    EXPECT_EQ(Buffer::make(64, device_memory()).status().message(), why);
    EXPECT_EQ(Buffer::make(64, pinned_memory()).status().message(), why);
  }).join();
}

// Copies through memory and a stream of one GPU.
void expect_round_trip(int ordinal, int seed) {
  constexpr int64_t kInts = 1 << 16, kBytes = kInts * int64_t{sizeof(int)};
  const DeviceScope scope(gpu(ordinal));
  Stream stream = Stream::make().value();
  const StreamScope on_stream(stream);
  const Buffer memory = Buffer::make(kBytes, device_memory()).value();
  const Buffer copy = Buffer::make(kBytes, device_memory()).value();
  EXPECT_EQ(gpu_of(memory.data()), ordinal);
  for (int round = 0; round < 20; ++round) {
    const std::vector<int> from(kInts, seed + round);
    std::vector<int> to(kInts);
    ASSERT_TRUE(device_memory().upload(memory.data(), from.data(), kBytes).ok());
    copy_async(copy.data(), memory.data(), kBytes);
    ASSERT_TRUE(stream.synchronize().ok());
    ASSERT_TRUE(device_memory().download(to.data(), copy.data(), kBytes).ok());
    ASSERT_EQ(to, from);
    ASSERT_EQ(selected_gpu(), ordinal);
  }
}

TEST(DeviceScope, BelongsToOneThread) {
  const int last = num_gpus() - 1;
  std::thread first([] { expect_round_trip(0, 1000); }), second([=] { expect_round_trip(last, 2000); });
  first.join();
  second.join();
}

// Memory and streams record their GPU, so any thread can use and release them.
TEST(DeviceScope, IsNotNeededToReleaseOrToCopy) {
  const int last = num_gpus() - 1;
  Buffer memory;
  Stream stream;
  MemoryResource* resource = nullptr;
  {
    const DeviceScope scope(gpu(last));
    resource = &device_memory();
    memory = Buffer::make(sizeof(int), device_memory()).value();
    stream = Stream::make().value();
  }
  std::thread([&] {
    const int from = 7;
    int to = 0;
    EXPECT_TRUE(resource->upload(memory.data(), &from, sizeof from).ok());
    EXPECT_TRUE(resource->download(&to, memory.data(), sizeof to).ok());
    EXPECT_EQ(to, 7);
    memory = Buffer();
    stream = Stream();
    EXPECT_EQ(DeviceContext::current(), nullptr);
    EXPECT_EQ(selected_gpu(), last);
  }).join();
}

}  // namespace
}  // namespace fp4moe
