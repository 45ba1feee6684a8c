// ThroughputWindow: output tokens per second over the last few seconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <iterator>

namespace fp4moe {

class ThroughputWindow {
 public:
  using Clock = std::chrono::steady_clock;

  // num_tokens: the number of tokens generated since startup.
  void add(Clock::time_point now, int64_t num_tokens) {
    while (samples_.size() > 1 && now - samples_[1].time > kWindow) samples_.pop_front();
    samples_.push_back({now, num_tokens});
  }

  // Returns tokens per second. Counts tokens since the last sample before the window, or since startup.
  double rate(Clock::time_point now, double uptime_seconds, int64_t num_tokens) const {
    const auto first =
        std::ranges::find_if(samples_, [&](const Sample& s) { return now - s.time <= kWindow; });
    const int64_t before = first == samples_.begin() ? 0 : std::prev(first)->num_tokens;
    const double window = std::min(uptime_seconds, std::chrono::duration<double>(kWindow).count());
    return window > 0 ? static_cast<double>(num_tokens - before) / window : 0;
  }

 private:
  static constexpr std::chrono::seconds kWindow{5};
  struct Sample {
    Clock::time_point time;
    int64_t num_tokens;
  };
  std::deque<Sample> samples_;  // those in the window, and the last one before it
};

}  // namespace fp4moe
