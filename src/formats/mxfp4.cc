#include "formats/mxfp4.h"

#include "formats/block_quantize.h"
#include "formats/e8m0.h"
#include "formats/fp4_matrix.h"

namespace fp4moe {
namespace {

struct BlockScale {
  uint8_t byte;
  float multiplier;  // applied to the elements before encoding
};

BlockScale block_scale(float amax, Mxfp4ScaleRule rule) {
  if (amax == 0) return {0, 0};
  if (rule == Mxfp4ScaleRule::kRoundUp) {
    const uint8_t byte = e8m0_encode_round_up(amax * (1.0f / 6.0f));
    return {byte, byte == 0 ? 1.0f : e8m0_decode(254 - byte)};
  }
  const uint8_t byte = e8m0_encode_ocp_floor(amax);
  return {byte, e8m0_decode(254 - byte)};
}

template <class T>
void quantize_row(const T* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales) {
  for (int64_t g = 0; g < cols / kMxfp4Block; ++g) {
    const BlockScale scale = block_scale(block_quantize::amax(x, kMxfp4Block), rule);
    scales[g] = scale.byte;
    block_quantize::encode(x, kMxfp4Block, scale.multiplier, codes);
    x += kMxfp4Block, codes += kMxfp4Block / 2;
  }
}

}  // namespace

void mxfp4_quantize_row(const float* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales) {
  quantize_row(x, cols, rule, codes, scales);
}
void mxfp4_quantize_row(const bf16* x, int64_t cols, Mxfp4ScaleRule rule, uint8_t* codes, uint8_t* scales) {
  quantize_row(x, cols, rule, codes, scales);
}

void mxfp4_dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t cols, float* out) {
  fp4_dequantize_row({Fp4Format::kMxfp4, 1, cols, codes, scales, cols / 2, cols / kMxfp4Block, 1.0f}, 0, out);
}

}  // namespace fp4moe
