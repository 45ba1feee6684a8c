// LogLimit: a rate limit for log lines that a peer can trigger.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/log.h"

namespace fp4moe {

// Passes a burst of lines at once, then one per interval. The number of dropped lines is logged before the
// next line that passes. Thread-safe.
class LogLimit {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LogLimit(int burst = 20, std::chrono::milliseconds interval = std::chrono::seconds(5))
      : burst_(burst), interval_(interval) {}

  void log(LogLevel level, const std::string& line, Clock::time_point now = Clock::now());

 private:
  const int burst_;
  const Clock::duration interval_;
  std::mutex mutex_;
  Clock::time_point full_at_{};  // when the whole burst is available again; a past time means now
  int64_t num_dropped_ = 0;
};

}  // namespace fp4moe
