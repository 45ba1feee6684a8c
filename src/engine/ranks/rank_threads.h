// RankThreads: one thread for each rank but the first, which is the caller's, to run the same function on
// all.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace fp4moe {

class RankThreads {
 public:
  // Throws std::system_error if the system refuses a thread.
  explicit RankThreads(int num_ranks);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls function(rank) for all ranks at once, rank 0 on the calling thread, and returns when all have
  // returned. The function must not throw. Not re-entrant.
  void run(const std::function<void(int rank)>& function);

 private:
  void loop(int rank);
  void end();

  const std::function<void(int)>* function_ = nullptr;
  std::atomic<uint32_t> round_{
      0};  // of run(); odd wake-ups are never lost: a thread compares with its own count
  std::atomic<uint32_t> running_{0};  // threads that have not finished the round
  std::atomic<bool> ends_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
