#include "formats/fp8_matrix.h"

#include "formats/e4m3.h"

namespace fp4moe {

void fp8_dequantize_row(const Fp8LinearView& w, int64_t k, int64_t row, float* out) {
  const uint8_t* codes = w.codes + row * k;
  const float* scales = w.scales + row / w.row_block * ((k + w.col_block - 1) / w.col_block);
  for (int64_t c = 0; c < k; ++c) out[c] = e4m3_decode(codes[c]) * scales[c / w.col_block];
}

}  // namespace fp4moe
