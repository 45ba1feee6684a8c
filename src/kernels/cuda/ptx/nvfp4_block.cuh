// The scale of an NVFP4 block by the rule of formats/nvfp4.h, bit for bit. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "formats/e4m3.h"
#include "formats/nvfp4.h"

namespace fp4moe::cuda {

constexpr float kMaxFloat = 3.402823466e38f;

struct Nvfp4BlockScale {
  uint8_t code;      // e4m3
  float value;       // of `code`
  float multiplier;  // an element's code is e2m1_encode(element * multiplier)
};

// `amax` is the largest magnitude in the block; `encode` is the tensor scale and `decode` its reciprocal.
__device__ __forceinline__ Nvfp4BlockScale nvfp4_block_scale(float amax, float encode, float decode) {
  if (amax == 0) return {0, 0.0f, 0.0f};
  const uint8_t code = e4m3_encode(__fmul_rn(amax, __fmul_rn(encode, 1.0f / 6.0f)));
  const float value = e4m3_decode(code);
  return {code, value, fminf(__fdiv_rn(1.0f, __fmul_rn(value, decode)), kMaxFloat)};
}

// The tensor scale of a row with this largest magnitude.
__device__ __forceinline__ float nvfp4_row_encode_scale(float amax) {
  const float encode = fminf(__fdiv_rn(kNvfp4Range, amax), kMaxFloat);
  return encode == 0 ? 1.0f : encode;
}

}  // namespace fp4moe::cuda
