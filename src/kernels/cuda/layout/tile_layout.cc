#include "kernels/cuda/layout/tile_layout.h"

#include <algorithm>
#include <string>

namespace fp4moe {
namespace {

bool is_zero_group(const uint8_t* codes, int64_t bytes) {
  return std::all_of(codes, codes + bytes, [](uint8_t b) { return (b & 0x77) == 0; });
}

}  // namespace

Status check_gate_up(const Fp4MatrixView& gate, const Fp4MatrixView& up) {
  if (gate.rows == up.rows && gate.cols == up.cols && gate.format == up.format && gate.rows % 32 == 0)
    return {};
  return invalid_argument("gate [" + std::to_string(gate.rows) + ", " + std::to_string(gate.cols) +
                          "] and up [" + std::to_string(up.rows) + ", " + std::to_string(up.cols) +
                          "] must have the same shape and format, with a multiple of 32 rows");
}

Status check_scale_span(int span) {
  if (span <= kMaxScaleSpan) return {};
  return unsupported("e8m0 scales of one matrix span " + std::to_string(span) +
                     " octaves; the tiles allow at most " + std::to_string(kMaxScaleSpan));
}

void ScaleRange::add_row(const Fp4MatrixView& w, int64_t row) {
  const int block = fp4_block(w.format);
  for (int64_t i = 0; i < w.cols / block; ++i) {
    const int scale = w.scales[row * w.scale_stride_bytes + i];
    if (scale >= least && scale <= most) continue;
    if (is_zero_group(w.codes + row * w.code_stride_bytes + i * block / 2, block / 2)) continue;
    least = std::min(least, scale);
    most = std::max(most, scale);
  }
}

}  // namespace fp4moe
