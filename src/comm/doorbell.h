// Doorbell: lets a thread sleep until another thread rings, or until a timeout.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fp4moe {

class Doorbell {
 public:
  // Returns the value to pass to wait(). Call it before the last check of the condition to wait for.
  uint32_t read() const { return word_.load(); }
  // Returns after any ring() since read() returned `value`, after `timeout`, or spuriously.
  void wait(uint32_t value, std::chrono::nanoseconds timeout);
  void ring();  // wakes all waiting threads

 private:
  std::atomic<uint32_t> word_{0};
};

}  // namespace fp4moe
