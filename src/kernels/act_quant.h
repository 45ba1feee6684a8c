// Quantised activations as the GEMMs read them: values that are exact in bf16, and the scales that multiply
// the sums. One implementation for every runner, so that all of them see the same codes.
#pragma once

#include <cstdint>

#include "formats/tensor_scale.h"
#include "kernels/ops.h"

namespace fp4moe {

enum class ActQuantKind : uint8_t {
  kNvfp4Static,    // out = code * block scale; the caller applies the tensor scale (in alpha)
  kNvfp4PerToken,  // the same with one tensor scale per row: row_scales = rowamax / 2688
  kInt8Block,      // out = round(x / s), ties to even, with s = (the block's max |x|) / 127 -> block_scales
  kFp8PerToken,    // out = the values of fp8_quantize_token()'s codes (formats/fp8.h); scale -> row_scales
};

struct ActQuantArgs {
  ActQuantKind kind = ActQuantKind::kNvfp4Static;
  ActRows x;          // [T, K], bf16 or f32; K a multiple of `block`
  int block = 16;     // kInt8Block: 16 or 32; NVFP4: 16
  EncodeScale scale;  // kNvfp4Static
  // [T, K], bf16 or f32 (the values are exact in both); may alias x if the dtypes agree. kInt8Block can also
  // write kI8 codes for byte dot products, with each group of eight columns in the order 0 4 1 5 2 6 3 7; out
  // must then not overlap x.
  ActRows out;
  float* row_scales = nullptr;    // [T], kNvfp4PerToken and kFp8PerToken
  float* block_scales = nullptr;  // [T, K / block], kInt8Block
  // [T, K / block], written for kI8 rows: kInt8Start times the sum of the block's codes.
  int32_t* block_starts = nullptr;
};

// Byte dot products multiply x by 2 * e2m1 value + 12, which is never negative. Each sum therefore starts at
// kInt8Start times the sum of its x codes, which cancels the 12.
inline constexpr int kInt8Start = -12;

// Limits of int8 scales. Within them, half a scale is a normal number, and its product with a block's sum
// neither underflows nor overflows, so the product is rounded only once.
inline constexpr float kMinInt8Scale = 0x1p-125f, kMaxInt8Scale = 0x1p110f;

// Quantises x. NVFP4 follows the exact mode of formats/nvfp4.h: a NaN does not affect any scale and becomes 6
// times the block scale; infinity saturates. An int8 block whose scale would be below kMinInt8Scale becomes
// zeros with scale 0; a block that contains a NaN, or whose scale would exceed kMaxInt8Scale, becomes zeros
// with scale NaN, which makes the row's sums NaN.
void quantize_act(const ActQuantArgs& args);  // single-threaded: the caller spreads rows over threads

}  // namespace fp4moe
