// Oracle for the scalar encoders: searches for the nearest value in double, in tables written from the
// formats' definitions. It shares no code with src/formats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace fp4moe::oracle {

// Magnitudes of codes 0, 1, 2, ...: ascending; consecutive codes differ in the parity of the fraction.
inline std::vector<double> e2m1_magnitudes() { return {0, 0.5, 1, 1.5, 2, 3, 4, 6}; }

inline std::vector<double> e4m3_magnitudes() {
  std::vector<double> values;
  for (int code = 0; code < 0x7f; ++code) {  // 0x7f is NaN
    const int exponent = code / 8, fraction = code % 8;
    values.push_back(exponent == 0 ? std::ldexp(fraction / 8.0, -6)
                                   : std::ldexp(1 + fraction / 8.0, exponent - 7));
  }
  return values;
}

// Returns the code of the magnitude nearest to |x| (ties to the even code, saturating), plus the sign bit. x
// must not be NaN.
inline int nearest_code(const std::vector<double>& magnitudes, double x, int sign_bit) {
  const double a = std::min(std::abs(x), magnitudes.back());  // above that, differences in double could tie
  int best = 0;
  for (int code = 1; code < static_cast<int>(magnitudes.size()); ++code) {
    const double closer = std::abs(magnitudes[best] - a) - std::abs(magnitudes[code] - a);
    if (closer < 0) break;  // the magnitudes ascend
    if (closer > 0 || code % 2 == 0) best = code;
  }
  return (std::signbit(x) ? sign_bit : 0) | best;
}

inline int e2m1(double x) {
  static const std::vector<double> kMagnitudes = e2m1_magnitudes();
  return nearest_code(kMagnitudes, x, 0x8);
}
inline int e4m3(double x) {
  static const std::vector<double> kMagnitudes = e4m3_magnitudes();
  return nearest_code(kMagnitudes, x, 0x80);
}

}  // namespace fp4moe::oracle
