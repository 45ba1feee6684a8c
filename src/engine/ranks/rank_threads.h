// RankThreads: runs the same function for all ranks at once. Each rank has its own thread, except rank 0,
// which uses the caller's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Returns the status that explains a failure; OK if all are. statuses[r] is that of rank r, which the message
// names. A failed rank keeps the other ranks waiting until their deadline, so any other error takes
// precedence over kDeadline. A GPU's error also reaches the GPUs that share memory with it, so the message
// has the errors of all ranks: one of them names the kernel that failed.
Status cause_of(std::span<const Status> statuses);

class RankThreads {
 public:
  // Throws std::system_error if the system cannot create a thread.
  explicit RankThreads(int num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls function(rank) for all ranks at once, rank 0 on the calling thread. Returns cause_of() their
  // statuses when all calls have returned; an exception counts as a status (guarded()). Not re-entrant.
  Status run(const std::function<Status(int rank)>& function);

 private:
  void call(int rank);
  void loop(int rank);
  void end();

  const std::function<Status(int)>* function_ = nullptr;
  std::vector<Status> statuses_;  // [rank], of this round
  std::atomic<uint32_t> round_{
      0};  // counts the calls of run(); a thread compares it with its own count, so it misses no round
  std::atomic<uint32_t> running_{0};  // threads that have not finished the round
  std::atomic<bool> ends_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
