// Activation rows in E4M3: with one f32 scale (decode direction) per 128 columns, or with one per token. For
// a group, in IEEE f32 without contraction:
//   A = min(max |x|, FLT_MAX);   scale = A / 448;   code = e4m3(x / scale)
//   value = code * scale
// A group whose scale is zero (all zeros, or underflow) has zero codes with the signs kept. NaN elements are
// ignored in A and stay NaN; an infinity becomes 448 * scale. The last group may be short.
#pragma once

#include <cstdint>

#include "formats/bf16.h"

namespace fp4moe {

inline constexpr int64_t kFp8Group = 128;
constexpr int64_t fp8_num_groups(int64_t cols) { return (cols + kFp8Group - 1) / kFp8Group; }

// Quantises one row: codes [cols], scales [fp8_num_groups(cols)].
void fp8_quantize_row(const float* x, int64_t cols, uint8_t* codes, float* scales);
void fp8_quantize_row(const bf16* x, int64_t cols, uint8_t* codes, float* scales);
// Quantises one token's row for w4a8 with a single scale s, and returns s: s = min(max |x|, FLT_MAX) / 448,
// or 0 if that is below 2^-126; code = e4m3(x * r) with r = 1 / s, or 0 if s = 0. NaN as above; an infinity
// becomes 448 s.
float fp8_quantize_token(const float* x, int64_t n, uint8_t* codes);
float fp8_quantize_token(const bf16* x, int64_t n, uint8_t* codes);

}  // namespace fp4moe
