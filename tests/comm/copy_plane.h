// CopyPlane: a plane whose ranks are GPUs, or streams of one GPU, of this process. It copies between them, in
// place of NCCL. One thread enqueues for all ranks: a rank's stream waits until the group's last rank has
// enqueued the same exchange, whose call enqueues the copies. Its operations cannot be captured in a graph.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "kernels/device_comm.h"
#include "kernels/group_plane.h"

namespace fp4moe {

// What the planes of a group share.
class CopyHub {
 public:
  explicit CopyHub(int num_ranks) : ranks_(static_cast<size_t>(num_ranks)) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    wait_ = reinterpret_cast<StreamValue>(dlsym(driver, "cuStreamWaitValue32_v2"));
    write_ = reinterpret_cast<StreamValue>(dlsym(driver, "cuStreamWriteValue32_v2"));
    EXPECT_TRUE(wait_ != nullptr && write_ != nullptr);
    EXPECT_EQ(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), cudaSuccess);
    void* host = nullptr;
    EXPECT_EQ(cudaHostAlloc(&host, sizeof(uint32_t), cudaHostAllocPortable), cudaSuccess);
    num_done_ = static_cast<uint32_t*>(host);
    *num_done_ = 0;
  }
  ~CopyHub() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    cudaStreamDestroy(copies_);
    cudaFreeHost(num_done_);
  }
  CopyHub(const CopyHub&) = delete;
  CopyHub& operator=(const CopyHub&) = delete;

  void exchange(int r, std::span<const PlaneTransfer> transfers) {
    Rank& rank = ranks_[static_cast<size_t>(r)];
    const StreamHandle stream = current_stream().handle();
    cudaEvent_t ready = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(ready, stream), cudaSuccess);
    events_.push_back(ready);
    rank.waiting.push_back({{transfers.begin(), transfers.end()}, ready});
    EXPECT_EQ(wait_(stream, address(), ++rank.num_exchanges, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
    if (!std::ranges::all_of(ranks_, [](const Rank& any) { return !any.waiting.empty(); })) return;
    for (const Rank& any : ranks_)
      EXPECT_EQ(cudaStreamWaitEvent(copies_, any.waiting.front().ready, 0), cudaSuccess);
    for (int to = 0; to < static_cast<int>(ranks_.size()); ++to) copy_to(to);
    EXPECT_EQ(write_(copies_, address(), ++num_enqueued_, 0), CUDA_SUCCESS);
    for (Rank& any : ranks_) any.waiting.pop_front();
  }

 private:
  using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  struct Exchange {
    std::vector<PlaneTransfer> transfers;
    cudaEvent_t ready = nullptr;  // what the rank sends is complete
  };
  struct Rank {
    std::deque<Exchange> waiting;  // for its peers
    uint32_t num_exchanges = 0;
  };
  CUdeviceptr address() const { return reinterpret_cast<CUdeviceptr>(num_done_); }
  std::vector<PlaneTransfer> between(int rank, int peer) const {
    std::vector<PlaneTransfer> list;
    for (const PlaneTransfer& t : ranks_[static_cast<size_t>(rank)].waiting.front().transfers)
      if (t.peer == peer) list.push_back(t);
    return list;
  }
  void copy_to(int to) {
    for (int from = 0; from < static_cast<int>(ranks_.size()); ++from) {
      const auto receives = between(to, from), sends = between(from, to);
      ASSERT_EQ(receives.size(), sends.size());
      for (size_t i = 0; i < sends.size(); ++i) {
        ASSERT_EQ(receives[i].receive_bytes, sends[i].send_bytes);
        EXPECT_EQ(cudaMemcpyAsync(receives[i].receive, sends[i].send,
                                  static_cast<size_t>(sends[i].send_bytes), cudaMemcpyDefault, copies_),
                  cudaSuccess);
      }
    }
  }

  std::vector<Rank> ranks_;
  std::vector<cudaEvent_t> events_;
  uint32_t num_enqueued_ = 0;
  uint32_t* num_done_ = nullptr;  // pinned: exchanges whose copies are complete
  cudaStream_t copies_ = nullptr;
  StreamValue wait_ = nullptr, write_ = nullptr;
};

class CopyPlane final : public GroupPlane {
 public:
  CopyPlane(std::shared_ptr<CopyHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  void exchange(const CommOp&, std::span<const PlaneTransfer> transfers) const override {
    hub_->exchange(rank_, transfers);
  }
  Status failure() const override { return {}; }

 private:
  const std::shared_ptr<CopyHub> hub_;
  const int rank_;
};

}  // namespace fp4moe
