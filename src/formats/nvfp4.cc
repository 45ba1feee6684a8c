#include "formats/nvfp4.h"

#include <algorithm>
#include <limits>

#include "formats/block_quantize.h"
#include "formats/e4m3.h"
#include "formats/fp4_matrix.h"

namespace fp4moe {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();

template <class T>
void quantize_row(const T* x, int64_t cols, EncodeScale gs, uint8_t* codes, uint8_t* scales) {
  const float scale_multiplier = gs.value * (1.0f / 6.0f);
  const float decode = to_decode(gs).value;
  for (int64_t g = 0; g < cols / kNvfp4Block; ++g) {
    const float amax = block_quantize::amax(x, kNvfp4Block);
    scales[g] = amax == 0 ? uint8_t{0} : e4m3_encode(amax * scale_multiplier);
    const float multiplier = amax == 0 ? 0.0f : std::min(1.0f / (e4m3_decode(scales[g]) * decode), kMax);
    block_quantize::encode(x, kNvfp4Block, multiplier, codes);
    x += kNvfp4Block, codes += kNvfp4Block / 2;
  }
}

template <class T>
DecodeScale quantize_row_per_token(const T* x, int64_t cols, uint8_t* codes, uint8_t* scales) {
  const float amax = block_quantize::amax(x, cols);
  const EncodeScale gs = nvfp4_encode_scale(amax);
  quantize_row(x, cols, gs, codes, scales);
  return amax == 0 ? DecodeScale{0} : to_decode(gs);
}

}  // namespace

EncodeScale nvfp4_encode_scale(float amax) {
  const float gs = std::min(kNvfp4Range / amax, kMax);
  return {gs == 0 ? 1.0f : gs};
}

void nvfp4_quantize_row(const float* x, int64_t cols, EncodeScale gs, uint8_t* codes, uint8_t* scales) {
  quantize_row(x, cols, gs, codes, scales);
}
void nvfp4_quantize_row(const bf16* x, int64_t cols, EncodeScale gs, uint8_t* codes, uint8_t* scales) {
  quantize_row(x, cols, gs, codes, scales);
}

DecodeScale nvfp4_quantize_row_per_token(const float* x, int64_t cols, uint8_t* codes, uint8_t* scales) {
  return quantize_row_per_token(x, cols, codes, scales);
}
DecodeScale nvfp4_quantize_row_per_token(const bf16* x, int64_t cols, uint8_t* codes, uint8_t* scales) {
  return quantize_row_per_token(x, cols, codes, scales);
}

void nvfp4_dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t cols, DecodeScale scale,
                          float* out) {
  fp4_dequantize_row({Fp4Format::kNvfp4, 1, cols, codes, scales, cols / 2, cols / kNvfp4Block, scale.value},
                     0, out);
}

}  // namespace fp4moe
