// The comparators of all tests. NaN never passes a tolerance; a budget comes from a formula, not from a magic
// number.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>

#include "base/relative_l2.h"

namespace fp4moe {

// Passes if |actual[i] - expected[i]| <= budget[i] for all i (budget has the same length, or length 1). Any
// NaN or infinity fails unless both sides hold the same infinity. On failure reports the worst index, both
// values, the error in units of its budget, and the number of elements over budget.
testing::AssertionResult within_budget(std::span<const float> actual, std::span<const float> expected,
                                       std::span<const float> budget);

// Passes if relative_l2(actual, expected) <= limit; reports the value.
testing::AssertionResult within_relative_l2(std::span<const float> actual, std::span<const float> expected,
                                            double limit);

// Returns whether a and b are bitwise equal; a NaN equals only the same NaN.
bool same_bits(std::span<const float> a, std::span<const float> b);

// Passes if the bytes are equal; on failure reports the first difference.
testing::AssertionResult same_bytes(std::span<const uint8_t> actual, std::span<const uint8_t> expected);

}  // namespace fp4moe
