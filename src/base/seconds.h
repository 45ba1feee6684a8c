// Elapsed seconds as a double. All flags and reports give times in seconds.
#pragma once

#include <chrono>

namespace fp4moe {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace fp4moe
