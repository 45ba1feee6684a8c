#include "support/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace fp4moe {

testing::AssertionResult within_budget(std::span<const float> actual, std::span<const float> expected,
                                       std::span<const float> budget) {
  if (actual.size() != expected.size())
    return testing::AssertionFailure() << "lengths differ: " << actual.size() << " and " << expected.size();
  if (budget.size() != 1 && budget.size() != expected.size())
    return testing::AssertionFailure()
           << "budget has " << budget.size() << " entries for " << expected.size();
  size_t worst = 0, num_over = 0;
  double worst_units = -1;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double limit = budget.size() == 1 ? budget[0] : budget[i];
    const bool same_infinity = std::isinf(actual[i]) && actual[i] == expected[i];
    const double error = same_infinity ? 0 : std::abs(static_cast<double>(actual[i]) - expected[i]);
    const bool passes = error <= limit;  // false for NaN
    double units = passes ? (limit > 0 ? error / limit : 0) : error / limit;
    if (std::isnan(units)) units = std::numeric_limits<double>::infinity();
    if (!passes) ++num_over;
    if (units > worst_units) worst_units = units, worst = i;
  }
  if (num_over == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << num_over << " of " << actual.size() << " over budget; worst at "
                                     << worst << ": actual " << actual[worst] << ", expected "
                                     << expected[worst] << ", " << worst_units << " x budget";
}

testing::AssertionResult within_relative_l2(std::span<const float> actual, std::span<const float> expected,
                                            double limit) {
  const double value = relative_l2(actual, expected);
  if (value <= limit) return testing::AssertionSuccess() << "relative L2 " << value;
  return testing::AssertionFailure() << "relative L2 " << value << " > " << limit;
}

testing::AssertionResult same_bytes(std::span<const uint8_t> actual, std::span<const uint8_t> expected) {
  if (actual.size() != expected.size())
    return testing::AssertionFailure() << "lengths differ: " << actual.size() << " and " << expected.size();
  for (size_t i = 0; i < actual.size(); ++i)
    if (actual[i] != expected[i])
      return testing::AssertionFailure()
             << "byte " << i << ": actual " << int{actual[i]} << ", expected " << int{expected[i]};
  return testing::AssertionSuccess();
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, {}, std::bit_cast<uint32_t, float>, std::bit_cast<uint32_t, float>);
}

}  // namespace fp4moe
