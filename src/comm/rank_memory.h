// RankMemory: what the ranks of one process share: heaps, signal cells, the sleep of those who wait, and the
// job's failure. The endpoints of every fabric wait here.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/buffer.h"
#include "comm/doorbell.h"
#include "comm/endpoint.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct RankMemoryShape {
  int num_ranks = 1;        // of the job: sources of signals
  int first_rank = 0;       // of this process
  int num_local_ranks = 1;  // of this process
  int64_t heap_bytes = 0;   // of each local rank
  uint32_t first_signal = 0;
};

class RankMemory {
 public:
  // kDoesNotFit names the rank whose heap the system refused.
  static Result<std::unique_ptr<RankMemory>> make(const RankMemoryShape& shape);

  const RankMemoryShape& shape() const { return shape_; }
  bool is_local(int rank) const {
    return rank >= shape_.first_rank && rank - shape_.first_rank < shape_.num_local_ranks;
  }
  uint8_t* heap(int rank) const { return local(rank).heap.data(); }

  // Raises the cell (src, slot) of local rank dst to `value`, with release; wakes dst if it waits for it. A
  // cell never goes back: an older value changes nothing. One thread raises the cells of one src.
  void raise(int src, int dst, int slot, uint32_t value);
  // Endpoint::wait() of local rank `rank`; one thread at a time for each rank.
  Status wait(int rank, int src, int slot, uint32_t value, std::chrono::nanoseconds timeout, uint32_t* seen);
  // Whether a local rank sleeps in wait().
  bool anyone_waits() const { return num_waiting_.load(std::memory_order_relaxed) > 0; }

  // The rank that `rank` sleeps for; -1 if for none, or if it is not of this process.
  int waits_for(int rank) const;

  // The first failure wins: true for that one. Wakes all who wait.
  bool fail(const Status& status);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const;

 private:
  struct Local {
    Buffer heap;
    std::vector<std::atomic<uint32_t>> cells;      // [num_ranks][kSignalSlots]: one cache line a source
    alignas(64) std::atomic<int32_t> awaited{-1};  // index of the cell slept for
    Doorbell doorbell;
    int polls = 0;  // before sleeping: of this rank's thread alone
  };
  explicit RankMemory(const RankMemoryShape& shape);
  Local& local(int rank) const { return *locals_[static_cast<size_t>(rank - shape_.first_rank)]; }
  Status sleep(Local& me, std::atomic<uint32_t>& cell, uint32_t value, std::chrono::nanoseconds timeout,
               uint32_t* seen);

  RankMemoryShape shape_;
  int max_polls_;
  std::vector<std::unique_ptr<Local>> locals_;
  std::atomic<int> num_waiting_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  Status failure_;
};

// Whether a counter that shows `seen` has come to `value`, modulo 2^32: they are less than 2^31 apart.
inline bool reached(uint32_t seen, uint32_t value) { return static_cast<int32_t>(seen - value) >= 0; }

}  // namespace fp4moe
