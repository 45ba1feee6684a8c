// E2M1, the 4-bit float of MXFP4 and NVFP4: 1 sign, 2 exponent (bias 1), 1 fraction bit. No infinity, no NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace fp4moe {

inline constexpr float kE2m1Max = 6.0f;
// The value of each code; 8..15 are the negatives of 0..7 (8 is -0).
inline constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The value of the low four bits of `code`. Computed, because device code cannot read the table.
constexpr float e2m1_decode(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 8) << 28, magnitude = code & 7;
  if (magnitude < 2) return std::bit_cast<float>(sign | (magnitude == 1 ? 0x3f000000u : 0u));
  return std::bit_cast<float>(sign | ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22);
}

// Rounds to nearest, ties to the even fraction bit; saturates to +-6; a NaN of either sign gives +6 (0x7);
// the sign of a zero is kept. The comparisons are with the midpoints; >= where a tie rounds up.
constexpr uint8_t e2m1_encode(float x) {
  if (x != x) return 0x7;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float a = std::bit_cast<float>(bits & 0x7fffffffu);
  const int magnitude =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return static_cast<uint8_t>((bits >> 31 << 3) | static_cast<uint32_t>(magnitude));
}

// Two codes per byte: the element with the even index is in the low nibble.
constexpr uint8_t e2m1_pack(uint8_t even, uint8_t odd) {
  return static_cast<uint8_t>((even & 0xf) | odd << 4);
}
constexpr uint8_t e2m1_even(uint8_t byte) { return byte & 0xf; }
constexpr uint8_t e2m1_odd(uint8_t byte) { return byte >> 4; }

}  // namespace fp4moe
