#include "kernels/act_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/nvfp4.h"

namespace fp4moe {
namespace {

float to_float(float x) { return x; }
float to_float(bf16 x) { return bf16_to_float(x); }
void assign(float& to, float x) { to = x; }
void assign(bf16& to, float x) { to = float_to_bf16(x); }

// One block of NVFP4, through its codes: code * block scale has at most six significand bits.
template <class In, class Out>
void nvfp4_block(const In* x, EncodeScale gs, Out* out) {
  uint8_t codes[kNvfp4Block / 2], scale_byte;
  nvfp4_quantize_row(x, kNvfp4Block, gs, codes, &scale_byte);
  const float scale = e4m3_decode(scale_byte);
  for (int i = 0; i < kNvfp4Block / 2; ++i) {
    assign(out[2 * i], e2m1_decode(e2m1_even(codes[i])) * scale);
    assign(out[2 * i + 1], e2m1_decode(e2m1_odd(codes[i])) * scale);
  }
}

// The encode scale of a row, and what undoes it.
struct RowScale {
  EncodeScale encode;
  float decode;
};
template <class In>
RowScale row_scale(const In* x, int64_t cols) {
  float amax = 0;  // NaN elements do not count
  for (int64_t i = 0; i < cols; ++i) amax = std::max(amax, std::abs(to_float(x[i])));
  const EncodeScale encode = nvfp4_encode_scale(amax);
  return {encode, amax == 0 ? 0 : to_decode(encode).value};
}

// Returns the block's scale.
template <class In, class Out>
float int8_block(const In* x, int block, Out* out) {
  float amax = 0;
  bool finite = true;
  for (int i = 0; i < block; ++i) {
    const float magnitude = std::abs(to_float(x[i]));
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    amax = std::max(amax, magnitude);
  }
  const float scale = amax / 127;
  if (!finite || scale == 0) {
    std::fill_n(out, block, Out{});
    return finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
  // A subnormal scale may be rounded down so far that the quotient passes 127.
  for (int i = 0; i < block; ++i)
    assign(out[i], std::clamp(std::nearbyint(to_float(x[i]) / scale), -127.0f, 127.0f));
  return scale;
}

template <class In, class Out>
void quantize_rows(const ActQuantArgs& a) {
  const int64_t cols = a.x.cols, blocks = cols / a.block;
  for (int64_t t = 0; t < a.x.rows; ++t) {
    const In* x = static_cast<const In*>(a.x.data) + t * cols;
    Out* out = static_cast<Out*>(a.out.data) + t * cols;
    EncodeScale scale = a.scale;
    if (a.kind == ActQuantKind::kNvfp4PerToken) {
      const RowScale row = row_scale(x, cols);
      scale = row.encode;
      a.row_scales[t] = row.decode;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      if (a.kind == ActQuantKind::kInt8Block)
        a.block_scales[t * blocks + b] = int8_block(x + b * a.block, a.block, out + b * a.block);
      else
        nvfp4_block(x + b * a.block, scale, out + b * a.block);
    }
  }
}

}  // namespace

void quantize_act(const ActQuantArgs& a) {
  const bool in_f32 = a.x.dtype == DType::kF32, out_f32 = a.out.dtype == DType::kF32;
  if (in_f32)
    out_f32 ? quantize_rows<float, float>(a) : quantize_rows<float, bf16>(a);
  else
    out_f32 ? quantize_rows<bf16, float>(a) : quantize_rows<bf16, bf16>(a);
}

}  // namespace fp4moe
