// Median, p10 and p90 of measured values.
#pragma once

#include <vector>

namespace fp4moe {

struct Spread {
  double median = 0, p10 = 0, p90 = 0;
};
Spread spread_of(std::vector<double> values);  // values must not be empty

}  // namespace fp4moe
