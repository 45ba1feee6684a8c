// The ranks that fp4moe bench comm measures: their GPUs, streams, communicators and random rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "bench/nccl_peer.h"
#include "comm/device_communicator.h"
#include "device/device_context.h"
#include "device/device_memory.h"
#include "device/stream.h"
#include "fp4moe/status.h"
#include "moe/device/device_exchange.h"

namespace fp4moe {

struct CommBenchOptions {
  int ranks = 0;  // 0: one per GPU
  int64_t hidden_size = 7168, intermediate_size = 2048, top_k = 8, num_experts = 256;
  std::vector<int64_t> tokens = {1, 8, 32, 64, 128, 512};
  std::vector<std::string> ops = {"all-reduce", "all-gather", "dispatch", "combine"};
  std::vector<std::string> rows = {"bf16", "fp8", "nvfp4", "nvfp4-row"};
  std::string a2a = "deepep";
  std::string reduce_dtype = "float32";
  std::string routing = "uniform";
  int repeats = 100;
  bool as_json = false;
};

struct CommBenchRank {
  DeviceContext* gpu = nullptr;
  Stream stream;
  std::unique_ptr<DeviceCommunicator> group;
  Buffer x, sum, gathered, ids, weights, y, row_of_slot, out, norm_weight, nvfp4_scale;
  Arena scratch;
};

// All ranks; the calling thread enqueues the work of each.
struct CommBenchRanks {
  std::vector<int> gpus;
  std::unique_ptr<PeerHeap> heap;
  std::vector<std::unique_ptr<CommBenchRank>> ranks;
  std::unique_ptr<NcclPeer> nccl;  // null if NCCL cannot be used
  std::string no_nccl;             // why it cannot be used

  int size() const { return static_cast<int>(ranks.size()); }
  Status for_each(const std::function<Status(int, CommBenchRank&)>& function) const {
    for (int r = 0; r < size(); ++r) {
      CommBenchRank& rank = *ranks[static_cast<size_t>(r)];
      const DeviceScope on_gpu(*rank.gpu);
      const StreamScope scope(rank.stream);
      FP4MOE_RETURN_IF_ERROR(function(r, rank));
    }
    return {};
  }
  Status synchronize() const {
    return for_each([](int, CommBenchRank& rank) {
      const Status status = rank.stream.synchronize();
      return status.ok() ? rank.group->failure() : status;
    });
  }
};

struct CommBenchRow {
  std::string op;
  int64_t tokens = 0;
  double p50 = 0, p99 = 0;  // microseconds on the slowest rank
  double bytes = 0;         // that a rank sends to other ranks, on average; 0: not counted
  double nccl = 0;          // microseconds; 0: not measured
};

// Measures the microseconds per `call` on the slowest rank: p50 and p99 over the replays of a graph of
// kCommCallsInGraph calls.
constexpr int kCommCallsInGraph = 40;
struct CommTimes {
  double p50 = 0, p99 = 0;
};
Result<CommTimes> time_comm_calls(const CommBenchRanks& all, int repeats,
                                  const std::function<Status(int, CommBenchRank&)>& call);

template <class T>
Result<Buffer> upload_to_gpu(const std::vector<T>& values) {
  return Buffer::copy_of(values.data(), std::ssize(values) * int64_t{sizeof(T)}, device_memory());
}

A2aShape shape_of(const CommBenchOptions& o, int num_ranks, A2aRowFormat format);

// One rank per GPU, or o.ranks; with buffers for the largest of o.tokens.
Result<CommBenchRanks> make_comm_bench_ranks(const CommBenchOptions& o);

}  // namespace fp4moe
