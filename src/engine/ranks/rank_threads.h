// RankThreads: runs the same function for all ranks at once. Each rank has its own thread, except rank 0,
// which uses the caller's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace fp4moe {

class RankThreads {
 public:
  // Throws std::system_error if the system cannot create a thread.
  explicit RankThreads(int num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls function(rank) for all ranks at once, rank 0 on the calling thread, and returns when all calls have
  // returned. The function must not throw. Not re-entrant.
  void run(const std::function<void(int rank)>& function);

 private:
  void loop(int rank);
  void end();

  const std::function<void(int)>* function_ = nullptr;
  std::atomic<uint32_t> round_{
      0};  // counts the calls of run(); a thread compares it with its own count, so it misses no round
  std::atomic<uint32_t> running_{0};  // threads that have not finished the round
  std::atomic<bool> ends_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
