// Median, p10 and p90 of measured values.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace fp4moe {

struct Spread {
  double median = 0, p10 = 0, p90 = 0;
};
// Precondition: values is not empty.
inline Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    return values[static_cast<size_t>(std::lround(part * static_cast<double>(values.size() - 1)))];
  };
  return {at(0.5), at(0.1), at(0.9)};
}

}  // namespace fp4moe
