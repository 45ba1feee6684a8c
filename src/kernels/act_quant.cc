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

void store_code(float* out, int i, float code) { out[i] = code; }
void store_code(bf16* out, int i, float code) { out[i] = float_to_bf16(code); }
void store_code(uint8_t* out, int i, float code) {
  out[i / 8 * 8 + i % 4 * 2 + i % 8 / 4] = static_cast<uint8_t>(static_cast<int>(code) + 128);
}

// Returns the block's scale.
template <class In, class Out>
float int8_block(const In* x, int block, Out* out) {
  float amax = 0;
  bool any_nan = false;
  for (int i = 0; i < block; ++i) {
    const float magnitude = std::abs(to_float(x[i]));
    any_nan = any_nan || std::isnan(magnitude);
    amax = std::max(amax, magnitude);
  }
  const float scale = amax / 127;
  const bool bad = any_nan || scale > kMaxInt8Scale;
  if (bad || scale < kMinInt8Scale) {
    for (int i = 0; i < block; ++i) store_code(out, i, 0);
    return bad ? std::numeric_limits<float>::quiet_NaN() : 0;
  }
  for (int i = 0; i < block; ++i) store_code(out, i, std::nearbyint(to_float(x[i]) / scale));
  return scale;
}

template <class In, class Out>
void int8_rows(const ActQuantArgs& a) {
  const int64_t blocks = a.x.cols / a.block;
  for (int64_t b = 0; b < a.x.rows * blocks; ++b)
    a.block_scales[b] = int8_block(static_cast<const In*>(a.x.data) + b * a.block, a.block,
                                   static_cast<Out*>(a.out.data) + b * a.block);
}

template <class In, class Out>
void nvfp4_rows(const ActQuantArgs& a) {
  const int64_t cols = a.x.cols;
  for (int64_t t = 0; t < a.x.rows; ++t) {
    const In* x = static_cast<const In*>(a.x.data) + t * cols;
    Out* out = static_cast<Out*>(a.out.data) + t * cols;
    EncodeScale scale = a.scale;
    if (a.kind == ActQuantKind::kNvfp4PerToken) {
      const RowScale row = row_scale(x, cols);
      scale = row.encode;
      a.row_scales[t] = row.decode;
    }
    for (int64_t i = 0; i < cols; i += kNvfp4Block) nvfp4_block(x + i, scale, out + i);
  }
}

template <class In>
void quantize_rows(const ActQuantArgs& a) {
  const bool int8 = a.kind == ActQuantKind::kInt8Block;
  if (a.out.dtype == DType::kU8)
    int8_rows<In, uint8_t>(a);
  else if (a.out.dtype == DType::kF32)
    int8 ? int8_rows<In, float>(a) : nvfp4_rows<In, float>(a);
  else
    int8 ? int8_rows<In, bf16>(a) : nvfp4_rows<In, bf16>(a);
}

}  // namespace

void quantize_act(const ActQuantArgs& a) {
  if (a.x.dtype == DType::kF32)
    quantize_rows<float>(a);
  else
    quantize_rows<bf16>(a);
}

}  // namespace fp4moe
