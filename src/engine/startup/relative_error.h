// How far one op's output differs from another's.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>

namespace fp4moe {

// Relative L2 error; infinite if any value is not finite.
inline double relative_error(std::span<const float> actual, std::span<const float> expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i]) || !std::isfinite(expected[i])) return INFINITY;
    const double d = static_cast<double>(actual[i]) - expected[i];
    difference += d * d;
    norm += static_cast<double>(expected[i]) * expected[i];
  }
  if (difference == 0) return 0;
  return norm == 0 ? INFINITY : std::sqrt(difference / norm);
}

}  // namespace fp4moe
