#include "formats/fp8.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/block_quantize.h"
#include "formats/e4m3.h"

namespace fp4moe {
namespace {

template <class T>
float scale_of(const T* x, int64_t n) {
  return std::min(block_quantize::amax(x, n), std::numeric_limits<float>::max()) / kE4m3Max;
}

template <class T>
void quantize_row(const T* x, int64_t cols, uint8_t* codes, float* scales) {
  for (int64_t begin = 0; begin < cols; begin += kFp8Group) {
    const int64_t end = std::min(begin + kFp8Group, cols);
    const float scale = scale_of(x + begin, end - begin);
    *scales++ = scale;
    for (int64_t i = begin; i < end; ++i) {
      const float value = block_quantize::to_float(x[i]);
      codes[i] = e4m3_encode(scale == 0 ? value * 0 : value / scale);
    }
  }
}

template <class T>
float quantize_token(const T* x, int64_t n, uint8_t* codes) {
  float scale = scale_of(x, n);
  if (scale < 0x1p-126f) scale = 0;
  const float inverse = scale == 0 ? 0 : 1 / scale;
  for (int64_t i = 0; i < n; ++i) codes[i] = e4m3_encode(block_quantize::to_float(x[i]) * inverse);
  return scale;
}

}  // namespace

float fp8_quantize_token(const float* x, int64_t n, uint8_t* codes) { return quantize_token(x, n, codes); }
float fp8_quantize_token(const bf16* x, int64_t n, uint8_t* codes) { return quantize_token(x, n, codes); }

void fp8_quantize_row(const float* x, int64_t cols, uint8_t* codes, float* scales) {
  quantize_row(x, cols, codes, scales);
}
void fp8_quantize_row(const bf16* x, int64_t cols, uint8_t* codes, float* scales) {
  quantize_row(x, cols, codes, scales);
}

}  // namespace fp4moe
