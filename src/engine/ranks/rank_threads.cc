#include "engine/ranks/rank_threads.h"

#include <pthread.h>

#include <string>

#include "base/guarded.h"

namespace fp4moe {

Status cause_of(std::span<const Status> statuses) {
  Status cause;
  for (size_t r = 0; r < statuses.size(); ++r) {
    const Status status = statuses[r].with_context("rank " + std::to_string(r));
    if (status.ok()) continue;
    if (cause.ok() || (cause.code() == StatusCode::kDeadline && status.code() != StatusCode::kDeadline))
      cause = status;
    else if (status.code() != StatusCode::kDeadline)
      cause = {cause.code(), cause.message() + "; " + status.message()};
  }
  return cause;
}

RankThreads::RankThreads(int num_ranks) : statuses_(static_cast<size_t>(num_ranks)) {
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

Status RankThreads::run(const std::function<Status(int)>& function) {
  function_ = &function;
  running_ = static_cast<uint32_t>(threads_.size());
  ++round_;
  round_.notify_all();
  call(0);
  for (uint32_t left = running_; left != 0; left = running_) running_.wait(left);
  return cause_of(statuses_);
}

void RankThreads::call(int rank) {
  statuses_[static_cast<size_t>(rank)] = guarded([&] { return (*function_)(rank); }, StatusCode::kDoesNotFit);
}

void RankThreads::loop(int rank) {
  pthread_setname_np(pthread_self(), ("rank " + std::to_string(rank)).c_str());
  for (uint32_t seen = 0;;) {
    round_.wait(seen);
    ++seen;
    if (ends_) return;
    call(rank);
    if (--running_ == 0) running_.notify_one();
  }
}

}  // namespace fp4moe
