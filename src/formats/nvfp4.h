// NVFP4: blocks of 16 along K, E4M3 block scales, one f32 scale per tensor, or per row ("per token").
//
// Quantisation follows Transformer Engine's rule, in IEEE f32 without contraction, so that every
// implementation gives the same bits. With the encode scale gs and A = max |x| of the block:
//   sf = e4m3(A * (gs * f32(1/6)));   o = min(1 / (sf * (1 / gs)), FLT_MAX);   code = e2m1(x * o)
// A block of zeros gets sf = 0 and zero codes with the signs kept. If sf underflows to 0 although A > 0, then
// o is FLT_MAX; the codes are arbitrary and the values 0. NaN elements are ignored in A and get code 0x7. An
// infinite A gives sf = 448, and infinities become +-6 * 448 / gs.
#pragma once

#include <cstdint>

#include "formats/bf16.h"
#include "formats/tensor_scale.h"

namespace fp4moe {

inline constexpr int kNvfp4Block = 16;
inline constexpr float kNvfp4Range = 2688;  // 6 * 448, the largest code times the largest block scale

// min(2688 / amax, FLT_MAX); amax = 0 gives FLT_MAX, amax = infinity gives 1.
EncodeScale nvfp4_encode_scale(float amax);

// Quantises one row of `cols` elements (a multiple of 16) in the linear layout: codes [cols / 2], scales
// [cols / 16].
void nvfp4_quantize_row(const float* x, int64_t cols, EncodeScale gs, uint8_t* codes, uint8_t* scales);
void nvfp4_quantize_row(const bf16* x, int64_t cols, EncodeScale gs, uint8_t* codes, uint8_t* scales);

// Quantises one row with its own scale, gs = nvfp4_encode_scale(amax of the row). Returns 1 / gs, or 0 for a
// row of zeros.
DecodeScale nvfp4_quantize_row_per_token(const float* x, int64_t cols, uint8_t* codes, uint8_t* scales);
DecodeScale nvfp4_quantize_row_per_token(const bf16* x, int64_t cols, uint8_t* codes, uint8_t* scales);

// out[i] = code * sf * scale, rounded once.
void nvfp4_dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t cols, DecodeScale scale,
                          float* out);

}  // namespace fp4moe
