// RankMemory: the state that the ranks of one process share: heaps, signal cells, sleeping ranks, and the
// job's failure. The endpoints of all fabrics use it to wait.
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
  int num_ranks = 1;          // in the job; each is a source of signals
  int first_rank = 0;         // in this process
  int num_local_ranks = 1;    // in this process
  int64_t heap_bytes = 0;     // per local rank
  uint32_t first_signal = 0;  // initial value of the cells
};

class RankMemory {
 public:
  // kDoesNotFit names the rank whose heap could not be allocated.
  static Result<std::unique_ptr<RankMemory>> make(const RankMemoryShape& shape);

  const RankMemoryShape& shape() const { return shape_; }
  bool is_local(int rank) const {
    return rank >= shape_.first_rank && rank - shape_.first_rank < shape_.num_local_ranks;
  }
  uint8_t* heap(int rank) const { return local(rank).heap.data(); }

  // Raises the cell (src, slot) of local rank dst to `value` (release), and wakes dst if it waits for this
  // cell. An older value has no effect. Only one thread may raise the cells of one src.
  void raise(int src, int dst, int slot, uint32_t value);
  // Implements Endpoint::wait() for local rank `rank`. One thread at a time per rank.
  Status wait(int rank, int src, int slot, uint32_t value, std::chrono::nanoseconds timeout, uint32_t* seen);
  // Whether a local rank sleeps in wait().
  bool anyone_waits() const { return num_waiting_.load(std::memory_order_relaxed) > 0; }

  // Returns the rank for whose signal `rank` sleeps; -1 if it does not sleep or is not in this process.
  int waits_for(int rank) const;

  // Sets the job's failure and wakes all waiting ranks. Returns false if the job has failed already.
  bool fail(const Status& status);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const;

 private:
  struct Local {
    Buffer heap;
    std::vector<std::atomic<uint32_t>> cells;      // [num_ranks][kSignalSlots]: one cache line per source
    alignas(64) std::atomic<int32_t> awaited{-1};  // cell that a sleeping rank waits for; -1: none
    Doorbell doorbell;
    int polls = 0;  // polls before sleeping; used by the rank's thread only
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

// Whether a counter at `seen` has reached `value`, modulo 2^32. Precondition: they are less than 2^31 apart.
inline bool reached(uint32_t seen, uint32_t value) { return static_cast<int32_t>(seen - value) >= 0; }

}  // namespace fp4moe
