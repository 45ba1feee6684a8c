#include "base/log_limit.h"

#include <algorithm>

namespace fp4moe {

void LogLimit::log(LogLevel level, const std::string& line, Clock::time_point now) {
  int64_t num_dropped = 0;
  {
    std::lock_guard lock(mutex_);
    const Clock::time_point full_at = std::max(full_at_, now) + interval_;
    if (full_at - now > burst_ * interval_) {
      ++num_dropped_;
      return;
    }
    full_at_ = full_at;
    std::swap(num_dropped, num_dropped_);
  }
  if (num_dropped > 0)
    fp4moe::log(LogLevel::kWarning,
                std::to_string(num_dropped) + " log lines like the next one were suppressed");
  fp4moe::log(level, line);
}

}  // namespace fp4moe
