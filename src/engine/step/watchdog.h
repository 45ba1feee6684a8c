// Watchdog: detects a thread that stays in one place for too long.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace fp4moe {

class Watchdog {
 public:
  // `on_stuck` is called once, on the watchdog's thread, with the place that was entered timeout_seconds ago
  // and has not been left. Time in which this process did not run (stopped, suspended) does not count. With
  // 0 seconds, the watchdog does nothing and has no thread.
  Watchdog(double timeout_seconds, std::function<void(const std::string& place)> on_stuck);
  ~Watchdog();

  // Called by the watched thread; `place` must outlive the watchdog.
  void enter(const char* place) {
    num_entered_.fetch_add(1, std::memory_order_relaxed);
    place_.store(place, std::memory_order_release);
  }
  void leave() { place_.store(nullptr, std::memory_order_release); }

 private:
  void watch();

  const std::chrono::duration<double> timeout_;
  const std::function<void(const std::string&)> on_stuck_;
  std::atomic<const char*> place_{nullptr};
  std::atomic<uint64_t> num_entered_{0};
  std::mutex mutex_;
  std::condition_variable end_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace fp4moe
