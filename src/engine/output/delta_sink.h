// DeltaSink: delivers a request's deltas to its callback. Nothing is delivered after the last delta,
// whichever thread sends it.
#pragma once

#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "fp4moe/request.h"

namespace fp4moe {

class DeltaSink {
 public:
  explicit DeltaSink(DeltaCallback on_delta) : on_delta_(std::move(on_delta)) {}

  void send(const Delta& delta) {
    std::lock_guard lock(mutex_);
    send_locked(delta);
  }
  // For threads other than the usual sender. Returns false if that sender is in the callback now.
  bool try_send(const Delta& delta) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) send_locked(delta);
    return lock.owns_lock();
  }
  // Why the request must end: the callback has thrown. Empty: it has not.
  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  void send_locked(const Delta& delta) {
    if (!on_delta_) return;
    try {
      on_delta_(delta);
    } catch (const std::exception& error) {
      failure_ = std::string("the callback has thrown: ") + error.what();
    } catch (...) {
      failure_ = "the callback has thrown";
    }
    if (delta.finish_reason != FinishReason::kNone) on_delta_ = nullptr;
  }

  std::mutex mutex_;
  DeltaCallback on_delta_;  // empty after the last delta
  std::string failure_;
};

}  // namespace fp4moe
