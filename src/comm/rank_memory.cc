// How a rank sleeps. The waiter publishes the index of its cell in `awaited`, reads the doorbell, checks the
// cell again and sleeps on the doorbell's value. The raiser stores the cell and then reads `awaited`. All
// these accesses are sequentially consistent, so either the waiter sees the cell's new value, or the raiser
// sees the waiter and rings the doorbell, which ends the sleep or prevents it. A signal for which no rank
// waits costs no system call.
#include "comm/rank_memory.h"

#include <algorithm>
#include <string>
#include <thread>

#include "base/check.h"
#include "base/guarded.h"

namespace fp4moe {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr int kMinPolls = 50;
constexpr nanoseconds kLongest = std::chrono::hours(24 * 365);  // keeps deadlines far from overflow

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Returns the number of polls before a sleep. Polling is cheap if each rank has its own core; on a shared
// core it delays the peer.
int polls_for(int num_local_ranks) {
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<unsigned>(num_local_ranks) < cores ? 4000 : 300;
}

}  // namespace

RankMemory::RankMemory(const RankMemoryShape& shape)
    : shape_(shape), max_polls_(polls_for(shape.num_local_ranks)) {}

Result<std::unique_ptr<RankMemory>> RankMemory::make(const RankMemoryShape& shape) {
  FP4MOE_CHECK(shape.num_local_ranks >= 1 && shape.first_rank >= 0 &&
                   shape.num_ranks - shape.first_rank >= shape.num_local_ranks,
               "first_rank=" + std::to_string(shape.first_rank) + ", num_local_ranks=" +
                   std::to_string(shape.num_local_ranks) + ", num_ranks=" + std::to_string(shape.num_ranks));
  std::unique_ptr<RankMemory> memory(new RankMemory(shape));
  for (int i = 0; i < shape.num_local_ranks; ++i) {
    Result<Buffer> heap = Buffer::make(shape.heap_bytes);
    if (!heap.ok())
      return heap.status().with_context("heap of rank " + std::to_string(shape.first_rank + i) + " of " +
                                        std::to_string(shape.num_ranks) + ", " +
                                        std::to_string(shape.heap_bytes) + " bytes per rank");
    auto local = std::make_unique<Local>();
    local->heap = std::move(*heap);
    local->cells = std::vector<std::atomic<uint32_t>>(static_cast<size_t>(shape.num_ranks) * kSignalSlots);
    for (auto& cell : local->cells) cell.store(shape.first_signal, std::memory_order_relaxed);
    local->polls = memory->max_polls_;
    memory->locals_.push_back(std::move(local));
  }
  return memory;
}

void RankMemory::raise(int src, int dst, int slot, uint32_t value) {
  Local& to = local(dst);
  const int index = src * kSignalSlots + slot;
  std::atomic<uint32_t>& cell = to.cells[static_cast<size_t>(index)];
  if (reached(cell.load(std::memory_order_relaxed), value)) return;
  cell.store(value);
  if (to.awaited.load() != index) return;
  to.doorbell.ring();
}

Status RankMemory::wait(int rank, int src, int slot, uint32_t value, nanoseconds timeout, uint32_t* seen) {
  FP4MOE_CHECK(src >= 0 && src < shape_.num_ranks && slot >= 0 && slot < kSignalSlots,
               "wait for rank " + std::to_string(src) + " slot " + std::to_string(slot));
  Local& me = local(rank);
  const int index = src * kSignalSlots + slot;
  std::atomic<uint32_t>& cell = me.cells[static_cast<size_t>(index)];
  for (int poll = 0;; ++poll) {
    *seen = cell.load(std::memory_order_acquire);
    if (failed()) return failure();
    if (reached(*seen, value)) {
      if (poll > 0) me.polls = std::min(max_polls_, 2 * me.polls);
      return {};
    }
    if (poll >= me.polls) break;
    relax();
  }
  me.polls = std::max(kMinPolls, me.polls / 2);
  num_waiting_.fetch_add(1, std::memory_order_relaxed);
  me.awaited.store(index);
  Status status = sleep(me, cell, value, timeout, seen);
  me.awaited.store(-1);
  num_waiting_.fetch_sub(1, std::memory_order_relaxed);
  return status;
}

Status RankMemory::sleep(Local& me, std::atomic<uint32_t>& cell, uint32_t value, nanoseconds timeout,
                         uint32_t* seen) {
  const auto deadline = steady_clock::now() + std::clamp(timeout, nanoseconds(0), kLongest);
  while (true) {
    const uint32_t bell = me.doorbell.read();
    *seen = cell.load();
    if (failed_.load()) return failure();
    if (reached(*seen, value)) return {};
    const nanoseconds left = deadline - steady_clock::now();
    if (left <= nanoseconds(0)) return {StatusCode::kDeadline, "no signal"};
    me.doorbell.wait(bell, left);
  }
}

int RankMemory::waits_for(int rank) const {
  const int index = is_local(rank) ? local(rank).awaited.load() : -1;
  return index < 0 ? -1 : index / kSignalSlots;
}

bool RankMemory::fail(const Status& status) {
  FP4MOE_CHECK(!status.ok(), "fail() with an ok status");
  {
    std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return false;
    failure_ = guarded([&] { return status; }, status.code());  // without memory, the code alone
    failed_.store(true);
  }
  for (const auto& to : locals_) to->doorbell.ring();
  return true;
}

Status RankMemory::failure() const {
  if (!failed()) return {};
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

}  // namespace fp4moe
