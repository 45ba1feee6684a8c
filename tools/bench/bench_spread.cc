#include "bench/bench_spread.h"

#include <algorithm>
#include <cmath>

namespace fp4moe {

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    return values[static_cast<size_t>(std::lround(part * static_cast<double>(values.size() - 1)))];
  };
  return {at(0.5), at(0.1), at(0.9)};
}

}  // namespace fp4moe
