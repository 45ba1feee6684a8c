// E8M0: eight exponent bits only; byte b is 2^(b - 127), 255 is NaN. The block scale of MXFP4.
#pragma once

#include <bit>
#include <cstdint>

namespace fp4moe {

// Exact for all 256 bytes; 0 is 2^-127, a subnormal float.
constexpr float e8m0_decode(uint8_t byte) {
  if (byte == 0) return 0x1p-127f;
  if (byte == 255) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(static_cast<uint32_t>(byte) << 23);
}

// The byte of the smallest power of two >= t: 127 + ceil(log2 t), saturated to [0, 254]. Precondition: t >= 0
// or NaN. 0 gives 0, +infinity 254, NaN 255.
constexpr uint8_t e8m0_encode_round_up(float t) {
  if (t != t) return 255;
  const uint32_t bits = std::bit_cast<uint32_t>(t);
  if (bits <= 0x00400000u) return 0;  // at most 2^-127; subnormals above it need 2^-126
  const uint32_t byte = (bits + 0x007fffffu) >> 23;
  return static_cast<uint8_t>(byte > 254 ? 254 : byte);
}

// The OCP microscaling rule for a block of E2M1 codes whose largest magnitude is `amax`: 127 + floor(log2
// amax) - 2, saturated to [0, 254], where 2 is the exponent of 6, the largest code. Precondition: amax >= 0
// or NaN. 0 gives 0, +infinity 253, NaN 255.
constexpr uint8_t e8m0_encode_ocp_floor(float amax) {
  if (amax != amax) return 255;
  // 0 for subnormals, whose scale is 2^-127 anyway.
  const uint32_t exponent = std::bit_cast<uint32_t>(amax) >> 23;
  return static_cast<uint8_t>(exponent > 2 ? exponent - 2 : 0);
}

}  // namespace fp4moe
