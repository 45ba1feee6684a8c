// SummedProgress: the progress of ranks that load in parallel.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "fp4moe/config.h"

namespace fp4moe {

// Sums the ranks' progress; each rank reports its own processed and total bytes.
class SummedProgress {
 public:
  SummedProgress(const ProgressSink& sink, size_t num_ranks) : sink_(sink), ranks_(num_ranks) {}
  ProgressSink of(size_t rank) {
    if (!sink_) return {};
    return [this, rank](int64_t done, int64_t total) {
      std::lock_guard lock(mutex_);
      ranks_[rank] = {done, total};
      int64_t all_done = 0, all_total = 0;
      for (const auto& [rank_done, rank_total] : ranks_) {
        all_done += rank_done;
        all_total += rank_total > 0 ? rank_total : total;  // a rank that has not reported yet is
                                                           // assumed to have as much to load
      }
      sink_(all_done, all_total);
    };
  }

 private:
  const ProgressSink& sink_;
  std::mutex mutex_;
  std::vector<std::pair<int64_t, int64_t>> ranks_;
};

}  // namespace fp4moe
