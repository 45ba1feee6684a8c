// Quantised activations as the GEMMs read them: values that are exact in bf16, and the scales that multiply
// the sums. One implementation for every runner, so that all of them see the same codes.
#pragma once

#include <cstdint>

#include "formats/tensor_scale.h"
#include "kernels/ops.h"

namespace fp4moe {

enum class ActQuantKind : uint8_t {
  kNvfp4Static,    // out = code * block scale; the tensor scale is the caller's (part of alpha)
  kNvfp4PerToken,  // the same with each row's own tensor scale: row_scales = rowamax / 2688
  kInt8Block,      // out = round(x / s), s = max |x| of the block / 127 -> block_scales; ties to even
  kFp8PerToken,    // out = the values of fp8_quantize_token()'s codes (formats/fp8.h), its s -> row_scales
};

struct ActQuantArgs {
  ActQuantKind kind = ActQuantKind::kNvfp4Static;
  ActRows x;          // [T, K], bf16 or f32; K a multiple of `block`
  int block = 16;     // kInt8Block: 16 or 32; NVFP4: 16
  EncodeScale scale;  // kNvfp4Static
  // [T, K], bf16 or f32: exact in either; may be x itself if the dtypes agree. kInt8Block also kI8, what byte
  // dots read: every eight columns in the order 0 4 1 5 2 6 3 7; must not overlap x.
  ActRows out;
  float* row_scales = nullptr;    // [T], kNvfp4PerToken and kFp8PerToken
  float* block_scales = nullptr;  // [T, K / block], kInt8Block
  // [T, K / block], with kI8 rows: kInt8Start times the sum of the block's codes.
  int32_t* block_starts = nullptr;
};

// Byte dots multiply doubled e2m1 codes + 12, which are not negative: their sums start here, for each x.
inline constexpr int kInt8Start = -12;

// An int8 scale of this range keeps its half and its products with a block's sum exact up to their one
// rounding.
inline constexpr float kMinInt8Scale = 0x1p-125f, kMaxInt8Scale = 0x1p110f;

// NVFP4 follows formats/nvfp4.h's exact mode on x's own values: NaN counts for no scale and becomes 6 block
// scales, infinity saturates. An int8 block whose scale would be below kMinInt8Scale gives zeros and scale 0;
// one that holds a NaN or would have a scale above kMaxInt8Scale gives zeros and scale NaN, so that the row's
// sums are NaN.
void quantize_act(const ActQuantArgs& args);  // the caller spreads rows over threads

}  // namespace fp4moe
