#include "formats/fp4_matrix.h"

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"

namespace fp4moe {
namespace {

float scale_value(Fp4Format format, uint8_t byte) {
  return format == Fp4Format::kMxfp4 ? e8m0_decode(byte) : e4m3_decode(byte);
}

}  // namespace

float fp4_at(const Fp4MatrixView& m, int64_t r, int64_t c) {
  const uint8_t byte = m.codes[r * m.code_stride_bytes + c / 2];
  const uint8_t scale = m.scales[r * m.scale_stride_bytes + c / fp4_block(m.format)];
  const float code = e2m1_decode(c % 2 == 0 ? e2m1_even(byte) : e2m1_odd(byte));
  return code * scale_value(m.format, scale) * m.tensor_scale;
}

void fp4_dequantize_row(const Fp4MatrixView& m, int64_t row, float* out) {
  const uint8_t* codes = m.codes + row * m.code_stride_bytes;
  const uint8_t* scales = m.scales + row * m.scale_stride_bytes;
  const int bytes_per_block = fp4_block(m.format) / 2;
  for (int64_t g = 0; g < m.cols / fp4_block(m.format); ++g) {
    float values[16];
    for (int code = 0; code < 16; ++code)
      values[code] = kE2m1Values[code] * scale_value(m.format, scales[g]) * m.tensor_scale;
    for (int i = 0; i < bytes_per_block; ++i, ++codes, out += 2) {
      out[0] = values[e2m1_even(*codes)];
      out[1] = values[e2m1_odd(*codes)];
    }
  }
}

}  // namespace fp4moe
