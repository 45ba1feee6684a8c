// MXFP4: blocks of 32 along K, E8M0 block scales, no tensor scale. value = code * 2^(byte - 127), exact in
// f32.
#pragma once

#include <cstdint>

#include "formats/bf16.h"

namespace fp4moe {

inline constexpr int kMxfp4Block = 32;

// How the scale byte b follows from A = max |x| of the block (NaN elements do not count; they become code
// 0x7). Codes are e2m1(x * 2^(127 - b)) in both, and zeros where A = 0 (b = 0).
enum class Mxfp4ScaleRule : uint8_t {
  kRoundUp,  // 127 + ceil(log2(A / 6)), the quotient as A * f32(1/6): never saturates; the inference engines'
             // rule. b = 0 (A below 6 * 2^-127) multiplies by 1 instead of 2^127, which flushes such blocks
             // to zero
  kOcpFloor,  // 127 + floor(log2 A) - 2: A in (6, 8) * 2^n saturates to 6 * 2^n; the OCP specification's rule
};

// One row of `cols` elements (a multiple of 32) in the linear layout: codes [cols / 2], scales [cols / 32].
void mxfp4_quantize_row(const float* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales);
void mxfp4_quantize_row(const bf16* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales);

void mxfp4_dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t cols, float* out);

}  // namespace fp4moe
