// E4M3 (the "fn" variant): 1 sign, 4 exponent (bias 7), 3 fraction bits; subnormals down to 2^-9, largest
// 448, no infinity, NaN is 0x7f or 0xff. The block scale of NVFP4 and the activation type of w4a8.
#pragma once

#include <bit>
#include <cstdint>

namespace fp4moe {

inline constexpr float kE4m3Max = 448.0f;

constexpr float e4m3_decode(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t exponent = (code >> 3) & 0xf, fraction = code & 0x7;
  if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 120) << 23 | fraction << 20);
  const float magnitude = static_cast<float>(fraction) * 0x1p-9f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Rounds to nearest, ties to even; saturates to +-448 (infinities too); a NaN of either sign gives 0x7f.
constexpr uint8_t e4m3_encode(float x) {
  if (x != x) return 0x7f;
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const float a = std::bit_cast<float>(magnitude);
  uint32_t code;
  if (a < 0x1p-6f) {  // subnormal: one unit in the last place of 2^14 is 2^-9, so the addition rounds
    code = std::bit_cast<uint32_t>(a + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  } else {
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    code = (rounded >> 20) - (120u << 3);
    if (code > 0x7e) code = 0x7e;
  }
  return static_cast<uint8_t>((bits >> 31 << 7) | code);
}

}  // namespace fp4moe
