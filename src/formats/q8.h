// Q8: 8-bit weights of dense layers, made from bf16 weights at load.
//
//   block   32 consecutive values of a row; a short last block is padded with zeros
//   scale   bf16, the block's largest magnitude / 127, rounded to nearest
//   codes   32 x int8 in [-127, 127], value / scale, rounded to nearest, ties to even
//   value   code * scale, exact in f32
//
// |value - code * scale| <= scale / 2: no code is clipped, because rounding the scale changes the largest
// quotient by at most 2^-9 of 127. An f16 scale (llama.cpp's Q8_0) has the same bound only for blocks above
// 0.008, where it is not subnormal; an f32 scale takes 6% more bytes for the same bound. A scale below 2^-126
// becomes 0, and then all codes are 0. A NaN or an infinity makes the scale NaN.
//
//   -1.0 among 0.5s:   scale 0x3c01 (0.0078735), codes -127 and 64 (0.50390625)
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "formats/bf16.h"

namespace fp4moe {

constexpr int64_t kQ8Block = 32;

struct Q8Block {
  bf16 scale;
  int8_t codes[kQ8Block] = {};
};
static_assert(sizeof(Q8Block) == 34);

constexpr int64_t q8_blocks(int64_t k) { return (k + kQ8Block - 1) / kQ8Block; }

// Quantises `count` <= 32 values.
inline Q8Block quantize_q8(const bf16* values, int64_t count) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it rounds to an integer
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(bf16_to_float(values[i]));
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    largest = magnitude > largest ? magnitude : largest;
  }
  Q8Block block;
  if (!finite) {
    block.scale = float_to_bf16(std::numeric_limits<float>::quiet_NaN());
    return block;
  }
  const float scale = round_to_bf16(largest / 127);
  if (scale < std::numeric_limits<float>::min()) return block;
  block.scale = float_to_bf16(scale);
  for (int64_t i = 0; i < count; ++i)
    block.codes[i] = static_cast<int8_t>((bf16_to_float(values[i]) / scale + kRound) - kRound);
  return block;
}

}  // namespace fp4moe
