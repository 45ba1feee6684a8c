// Doorbell: a thread sleeps until another one rings, or until a time has passed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fp4moe {

class Doorbell {
 public:
  // To be read before the last look at what one waits for.
  uint32_t read() const { return word_.load(); }
  // Returns after a ring() since read() gave `value`, after `timeout`, or for no reason.
  void wait(uint32_t value, std::chrono::nanoseconds timeout);
  void ring();  // wakes all

 private:
  std::atomic<uint32_t> word_{0};
};

}  // namespace fp4moe
