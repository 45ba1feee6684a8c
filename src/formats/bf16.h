// bfloat16: the upper half of an IEEE-754 binary32. 1 sign, 8 exponent, 7 fraction bits.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace fp4moe {

struct bf16 {
  uint16_t bits = 0;
  friend bool operator==(bf16, bf16) = default;
};

constexpr float bf16_to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest, ties to even; overflows to infinity; a NaN stays a quiet NaN with the same sign.
constexpr bf16 float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x0040u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

// x rounded to the nearest bf16, as a float.
constexpr float round_to_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }

inline std::vector<float> bf16_to_floats(std::span<const bf16> values) {
  std::vector<float> floats;
  floats.reserve(values.size());
  for (const bf16 x : values) floats.push_back(bf16_to_float(x));
  return floats;
}

}  // namespace fp4moe
