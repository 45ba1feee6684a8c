// The kernel that chooses replicas against ReplicaTable, for random placements and for ids out of range.
#include <gtest/gtest.h>

#include <random>

#include "device/device_context.h"
#include "device/device_memory.h"
#include "device/stream.h"
#include "kernels/device_a2a.h"
#include "moe/placement/expert_balance.h"

namespace fp4moe {
namespace {

TEST(DeviceReplicas, AreThoseOfTheTable) {
  auto* const gpu = DeviceContext::of(0).value();
  const DeviceScope on_gpu(*gpu);
  Stream stream = Stream::make().value();
  const StreamScope scope(stream);
  std::mt19937 random(3);
  const auto put = [](const std::vector<int32_t>& values) {
    return Buffer::copy_of(values.data(), std::ssize(values) * 4, device_memory()).value();
  };
  for (const auto& [ranks, logical, redundant, tokens, top_k] : {std::array{1, 3, 2, 1, 1},
                                                                 {2, 8, 4, 65, 4},
                                                                 {4, 32, 8, 300, 8},
                                                                 {8, 256, 32, 129, 8},
                                                                 {3, 7, 2, 0, 2}}) {
    const PlacementShape shape = {logical, logical + redundant, ranks};
    std::vector<int64_t> loads;
    for (int e = 0; e < logical; ++e) loads.push_back(static_cast<int64_t>(random() % 1000));
    const ExpertPlacement placement = balance_experts(loads, shape);
    std::vector<int32_t> ids;
    for (int i = 0; i < tokens * top_k; ++i)
      ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(logical + 2)) - 1);
    for (int rank = 0; rank < ranks; ++rank) {
      const ReplicaTable table = placement.table_of(rank);
      const Buffer first = put(table.first), replicas = put(table.replicas), given = put(ids);
      const Buffer out = Buffer::make(std::max<int64_t>(4, std::ssize(ids) * 4), device_memory()).value();
      cuda_a2a_ops()->choose_replicas({first.as<int32_t>(), replicas.as<int32_t>(), logical, rank},
                                      given.as<int32_t>(), tokens, top_k, out.as<int32_t>());
      ASSERT_TRUE(stream.synchronize().ok());
      std::vector<int32_t> chosen(ids.size()), expected;
      if (!ids.empty()) {
        ASSERT_TRUE(device_memory().download(chosen.data(), out.data(), std::ssize(ids) * 4).ok());
      }
      for (size_t i = 0; i < ids.size(); ++i)
        expected.push_back(
            ids[i] < 0 || ids[i] >= logical ? -1 : table.replica_of(ids[i], static_cast<int64_t>(i) / top_k));
      EXPECT_EQ(chosen, expected) << "rank " << rank << " of " << ranks;
    }
  }
}

}  // namespace
}  // namespace fp4moe
