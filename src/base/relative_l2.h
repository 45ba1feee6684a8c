// The relative L2 difference between two ops' outputs.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

namespace fp4moe {

// || actual - expected || / || expected ||, in double; infinity if either contains a NaN or an infinity, or
// the lengths differ. Two all-zero inputs give 0.
inline double relative_l2(std::span<const float> actual, std::span<const float> expected) {
  constexpr double kBad = std::numeric_limits<double>::infinity();
  if (actual.size() != expected.size()) return kBad;
  double error = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i]) || !std::isfinite(expected[i])) return kBad;
    const double d = static_cast<double>(actual[i]) - expected[i];
    error += d * d;
    norm += static_cast<double>(expected[i]) * expected[i];
  }
  if (norm == 0) return error == 0 ? 0 : kBad;
  return std::sqrt(error / norm);
}

}  // namespace fp4moe
