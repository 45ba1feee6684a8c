// The experts' tokens over the last seconds, out of counts since the start.
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

// Counts as they were seen, for as long as a window looks back. Times in seconds, ascending. Not thread-safe.
class LoadHistory {
 public:
  LoadHistory(double now, double longest) : start_(now), longest_(longest) {}
  void add(double now, const std::vector<int64_t>& counts);

  struct Since {
    double seconds = 0;           // what is covered: the window, up to one add() more, or less at the start
    std::vector<int64_t> counts;  // before it; empty: zeros
  };
  // Precondition: 0 < window <= longest.
  Since before(double now, double window) const;
  double start() const { return start_; }

 private:
  struct Seen {
    double first, last;  // when these counts were found
    std::vector<int64_t> counts;
  };
  double start_, longest_;
  std::deque<Seen> seen_;
};

// Looks at an engine's counts once a second until it is destroyed. Thread-safe.
class LoadWatch {
 public:
  static constexpr double kLongestWindow = 60;
  explicit LoadWatch(std::function<ExpertLoad()> read);
  ~LoadWatch();

  struct Window {
    double seconds = 0;  // as Since
    ExpertLoad load;     // of these seconds
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
  std::thread thread_;  // last: it uses the others
};

}  // namespace fp4moe
