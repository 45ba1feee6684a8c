#include "engine/ranks/rank_threads.h"

#include <pthread.h>

#include <string>

namespace fp4moe {

RankThreads::RankThreads(int num_ranks) {
  try {
    for (int rank = 1; rank < num_ranks; ++rank) threads_.emplace_back(&RankThreads::loop, this, rank);
  } catch (...) {
    end();
    throw;
  }
}

RankThreads::~RankThreads() { end(); }

void RankThreads::end() {
  ends_ = true;
  ++round_;
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void RankThreads::run(const std::function<void(int)>& function) {
  function_ = &function;
  running_ = static_cast<uint32_t>(threads_.size());
  ++round_;
  round_.notify_all();
  function(0);
  for (uint32_t left = running_; left != 0; left = running_) running_.wait(left);
}

void RankThreads::loop(int rank) {
  pthread_setname_np(pthread_self(), ("rank " + std::to_string(rank)).c_str());
  for (uint32_t seen = 0;;) {
    round_.wait(seen);
    ++seen;
    if (ends_) return;
    (*function_)(rank);
    if (--running_ == 0) running_.notify_one();
  }
}

}  // namespace fp4moe
