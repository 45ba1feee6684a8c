// LogLimit: log lines that a peer can cause, at a bounded rate.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/log.h"

namespace fp4moe {

// A burst of lines passes at once, then one for each interval; the others are counted, and the next line that
// passes says how many were left out. Thread-safe.
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
  Clock::time_point full_at_{};  // when all of the burst is available again; in the past: it is
  int64_t num_dropped_ = 0;
};

}  // namespace fp4moe
