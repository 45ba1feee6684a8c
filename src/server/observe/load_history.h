// Tokens per expert over the last seconds, from cumulative counts.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "fp4moe/engine.h"

namespace fp4moe {

// Snapshots of cumulative counts, as far back as the longest window. Times in seconds, ascending. Not
// thread-safe.
class LoadHistory {
 public:
  LoadHistory(double now, double longest) : start_(now), longest_(longest) {}
  void add(double now, const std::vector<int64_t>& counts);

  struct Since {
    double seconds = 0;           // covered time: the window plus at most one add() interval; initially less
    std::vector<int64_t> counts;  // cumulative counts at its beginning; empty: zeros
  };
  // Precondition: 0 < window <= longest.
  Since before(double now, double window) const;
  double start() const { return start_; }

 private:
  struct Seen {
    double first, last;  // first and last time the counts had these values
    std::vector<int64_t> counts;
  };
  double start_, longest_;
  std::deque<Seen> seen_;
};

// Samples an engine's counts once a second until destroyed. Thread-safe.
class LoadWatch {
 public:
  static constexpr double kLongestWindow = 60;
  explicit LoadWatch(std::function<ExpertLoad()> read);
  ~LoadWatch();

  struct Window {
    double seconds = 0;  // the covered time, as Since::seconds
    ExpertLoad load;     // tokens in that time
  };
  // window: (0, kLongestWindow], or 0: since the start.
  Window last(double window) const;

 private:
  void watch();

  const std::function<ExpertLoad()> read_;
  mutable std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  LoadHistory history_;
  std::thread thread_;  // last: uses the members above
};

}  // namespace fp4moe
