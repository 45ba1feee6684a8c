// ReadPace: bounds the rate at which all connections together receive large bodies, and with it the CPU time
// that uploads take from the engine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <mutex>

namespace fp4moe {

// Thread-safe.
class ReadPace {
 public:
  using Clock = std::chrono::steady_clock;

  // Up to `burst_bytes` are received at once, then `bytes_per_second`.
  ReadPace(double bytes_per_second, double burst_bytes)
      : seconds_per_byte_(1 / bytes_per_second), burst_(seconds_per_byte_ * burst_bytes) {}

  // A connection has received `bytes`; returns when it may receive more.
  Clock::time_point take(size_t bytes, Clock::time_point now) {
    const auto to_duration = [](double seconds) {
      return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    };
    std::lock_guard<std::mutex> lock(mutex_);
    paid_until_ = std::max(paid_until_, now - to_duration(burst_)) +
                  to_duration(seconds_per_byte_ * static_cast<double>(bytes));
    return paid_until_;
  }

 private:
  const double seconds_per_byte_, burst_;
  std::mutex mutex_;
  Clock::time_point paid_until_;
};

}  // namespace fp4moe
