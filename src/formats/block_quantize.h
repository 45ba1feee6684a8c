// Helpers of the block quantisers; private to src/formats.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/bf16.h"
#include "formats/e2m1.h"

namespace fp4moe::block_quantize {

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bf16_to_float(x); }

// max |x[i]|, ignoring NaNs; 0 if all elements are NaN.
template <class T>
float amax(const T* x, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::abs(to_float(x[i]));
    largest = a > largest ? a : largest;
  }
  return largest;
}

// codes[0, n / 2) = e2m1(x[i] * multiplier).
template <class T>
void encode(const T* x, int n, float multiplier, uint8_t* codes) {
  for (int i = 0; i < n; i += 2)
    codes[i / 2] =
        e2m1_pack(e2m1_encode(to_float(x[i]) * multiplier), e2m1_encode(to_float(x[i + 1]) * multiplier));
}

}  // namespace fp4moe::block_quantize
