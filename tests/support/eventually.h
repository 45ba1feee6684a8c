// Waits for a condition that another thread makes true.
#pragma once

#include <chrono>
#include <thread>

namespace fp4moe {

// Returns true as soon as the condition holds, false after 10 s.
template <class Condition>
bool eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace fp4moe
