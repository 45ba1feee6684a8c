// Ranks on GPUs for tests: one thread enqueues for all ranks of a group. If the machine has fewer GPUs than
// ranks, several ranks share a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "comm/copy_plane.h"
#include "comm/device_communicator.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "device/graph.h"

namespace fp4moe {

constexpr int kMostRanks = 8;

// Set before main() because it is read when the first GPU is used. A value from outside stays: with 1,
// kernels of a rank with a GPU of its own start early and use all of its SMs, as in production.
inline const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", std::to_string(kMostRanks).c_str(), 0);
  // A kernel that is loaded when it is first enqueued waits for its GPU, whose rank may wait for one that
  // this thread has not enqueued yet.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  return true;
}();

inline std::vector<int> gpus_of(int num_ranks) {
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  std::vector<int> ordinals;
  for (int r = 0; r < num_ranks; ++r) ordinals.push_back(r * std::min(count, num_ranks) / num_ranks);
  return ordinals;
}

struct TestRank {
  Stream stream;
  std::unique_ptr<DeviceCommunicator> group;
};

// The ranks of one group; the test's thread enqueues for all of them. If the region is staged, they do not
// share memory.
struct TestGroup {
  std::unique_ptr<PeerHeap> heap;
  std::vector<std::unique_ptr<TestRank>> ranks;

  explicit TestGroup(int num_ranks, DeviceRegion region = {0, 64 << 10, 64 << 10},
                     std::chrono::nanoseconds timeout = std::chrono::seconds(20)) {
    const std::vector<int> gpus = gpus_of(num_ranks);
    EXPECT_LE(num_ranks, ranks_per_gpu() * (gpus.back() + 1))
        << "more ranks per GPU than FP4MOE_RANKS_PER_GPU";
    const auto hub = region.is_staged ? std::make_shared<CopyHub>(num_ranks) : nullptr;
    if (hub == nullptr) heap = PeerHeap::make(gpus, region.offset + region.num_bytes(num_ranks)).value();
    for (int r = 0; r < num_ranks; ++r) {
      const DeviceScope scope(*DeviceContext::of(gpus[static_cast<size_t>(r)]).value());
      ranks.push_back(std::make_unique<TestRank>());
      ranks.back()->stream = Stream::make().value();
      const StreamScope stream(ranks.back()->stream);
      auto group = hub == nullptr ? DeviceCommunicator::make(*heap, 0, num_ranks, r, region, timeout)
                                  : DeviceCommunicator::make_staged(std::make_unique<CopyPlane>(hub, r), 0,
                                                                    num_ranks, r, region);
      ranks.back()->group = std::move(group).value();
    }
    synchronize();
  }
  int size() const { return static_cast<int>(ranks.size()); }
  template <class Function>
  void for_each(const Function& function) {
    for (int r = 0; r < size(); ++r) {
      const StreamScope scope(ranks[static_cast<size_t>(r)]->stream);
      function(r, *ranks[static_cast<size_t>(r)]->group);
    }
  }
  void synchronize() {
    for (const auto& rank : ranks) EXPECT_TRUE(rank->stream.synchronize().ok());
  }
  // Launches each rank's graph `times` times.
  void replay(const std::vector<Graph>& graphs, int times) {
    for (int i = 0; i < times; ++i)
      for (size_t r = 0; r < ranks.size(); ++r) {
        const StreamScope scope(ranks[r]->stream);
        graphs[r].launch(ranks[r]->stream);
      }
  }
  // Expects that a rank has missed a deadline with a message that contains `words`, and that no rank has
  // failed for another reason.
  void expect_deadline_naming(const std::string& words) const {
    int num_named = 0;
    for (const auto& rank : ranks) {
      const Status status = rank->group->failure();
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), StatusCode::kDeadline);
      num_named += status.message().find(words) != std::string::npos;
    }
    EXPECT_GE(num_named, 1) << words;
  }
  void expect_ok() {
    synchronize();
    for (const auto& rank : ranks)
      EXPECT_TRUE(rank->group->failure().ok()) << rank->group->failure().to_string();
  }
};

template <class T>
Buffer on_device(const std::vector<T>& values) {
  return Buffer::copy_of(values.data(), static_cast<int64_t>(values.size() * sizeof(T)), device_memory())
      .value();
}
template <class T>
std::vector<T> from_device(const Buffer& buffer) {
  std::vector<T> values(static_cast<size_t>(buffer.num_bytes()) / sizeof(T));
  EXPECT_TRUE(device_memory().download(values.data(), buffer.data(), buffer.num_bytes()).ok());
  return values;
}

inline std::vector<float> random_floats(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random);
  return values;
}

}  // namespace fp4moe
