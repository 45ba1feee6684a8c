// Elapsed seconds as a double. All flags and reports give times in seconds.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace fp4moe {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns text such as "0.25 s".
inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", seconds);
  return text;
}

}  // namespace fp4moe
