#include "engine/step/watchdog.h"

#include <algorithm>

namespace fp4moe {

Watchdog::Watchdog(double timeout_seconds, std::function<void(const std::string& place)> on_stuck)
    : timeout_(timeout_seconds), on_stuck_(std::move(on_stuck)) {
  if (timeout_seconds > 0) thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  end_.notify_one();
  if (thread_.joinable()) thread_.join();
}

// Polls every `tick`. Each poll without progress adds at most 2 * tick to the time without progress.
void Watchdog::watch() {
  using Seconds = std::chrono::duration<double>;
  const Seconds tick = std::min(timeout_ / 8, Seconds(1));
  uint64_t last_entered = 0;
  Seconds stayed{0};
  auto before = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!end_.wait_for(lock, tick, [this] { return ends_; })) {
    const auto now = std::chrono::steady_clock::now();
    const Seconds passed = std::min<Seconds>(now - before, 2 * tick);
    before = now;
    const char* place = place_.load(std::memory_order_acquire);
    const uint64_t entered = num_entered_.load(std::memory_order_relaxed);
    stayed = place != nullptr && entered == last_entered ? stayed + passed : Seconds(0);
    last_entered = entered;
    if (stayed < timeout_) continue;
    lock.unlock();
    return on_stuck_(place);
  }
}

}  // namespace fp4moe
