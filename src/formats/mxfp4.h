// MXFP4: blocks of 32 along K, E8M0 block scales, no tensor scale.
//   value = code * 2^(byte - 127), exact in f32
#pragma once

#include <cstdint>

#include "formats/bf16.h"

namespace fp4moe {

inline constexpr int kMxfp4Block = 32;

// The rule for the scale byte b from A = max |x| of the block, ignoring NaNs (their code is 0x7). Codes are
// e2m1(x * 2^(127 - b)) with both rules, and zeros if A = 0 (b = 0).
enum class Mxfp4ScaleRule : uint8_t {
  // The rule of inference engines: b = 127 + ceil(log2(A / 6)), with A * f32(1/6) for the quotient; never
  // saturates. If b = 0 (A below 6 * 2^-127), x is multiplied by 1 instead of 2^127, so the block becomes 0.
  kRoundUp,
  // The OCP specification's rule: b = 127 + floor(log2 A) - 2; A in (6, 8) * 2^n saturates to 6 * 2^n.
  kOcpFloor,
};

// Quantises one row of `cols` elements (a multiple of 32) in the linear layout: codes [cols / 2], scales
// [cols / 32].
void mxfp4_quantize_row(const float* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales);
void mxfp4_quantize_row(const bf16* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales);

void mxfp4_dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t cols, float* out);

}  // namespace fp4moe
