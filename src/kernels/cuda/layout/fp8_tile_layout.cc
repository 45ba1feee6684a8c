#include "kernels/cuda/layout/fp8_tile_layout.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"

namespace fp4moe {
namespace {

constexpr int kMxIndices = kFp8MxTop - kFp8MxBottom + 1;

// Maps one row's scale bytes to indices; `factor` multiplies the row's sums.
struct RowScale {
  Fp4Format format;
  int move = 0;  // MXFP4: added to the byte; NVFP4: to the exponent
  float factor = 1;

  uint8_t index(uint8_t scale) const {
    if (format == Fp4Format::kMxfp4)
      return static_cast<uint8_t>(8 * std::clamp(scale + move, 0, kMxIndices - 1));
    return e4m3_encode(std::ldexp(e4m3_decode(scale), move));
  }
};

Result<RowScale> row_scale(const Fp4MatrixView& w, int64_t r) {
  ScaleRange range;
  range.add_row(w, r);
  RowScale row{w.format};
  if (range.most == 0 && w.format == Fp4Format::kNvfp4) return row;
  if (w.format == Fp4Format::kMxfp4) {
    if (range.most < range.least) return row;  // only zeros
    FP4MOE_RETURN_IF_ERROR(
        check_fp8_scale_span(range.most - range.least).with_context("row " + std::to_string(r)));
    row.move = kMxIndices - 1 - range.most;
    row.factor = std::ldexp(1.0f, range.most - 127 - kFp8MxTop);
    return row;
  }
  const float most = e4m3_decode(static_cast<uint8_t>(range.most));
  row.move = 8 - std::ilogb(most);
  if (std::ldexp(most, row.move) > kE4m3Max) --row.move;
  row.factor = std::ldexp(8.0f, -row.move);
  return row;
}

// Puts one matrix's rows into the tiles at dst, which the caller has cleared.
Status put(const Fp4MatrixView& w, RowOrder order, int64_t n, uint8_t* dst) {
  const int block = fp4_block(w.format);
  auto* factors = reinterpret_cast<float*>(dst + fp8_row_factors_offset(w.format, n, w.cols));
  for (int64_t r = 0; r < w.rows; ++r) {
    FP4MOE_ASSIGN_OR_RETURN(const RowScale scale, row_scale(w, r));
    const int64_t row = tile_row(order, r);
    factors[row] = scale.factor;
    for (int64_t c = 0; c < w.cols; ++c) {
      const uint32_t code = w.codes[r * w.code_stride_bytes + c / 2] >> (c % 2 * 4) & 15u;
      const Fp8Place at(row, c);
      uint8_t* tile = dst + fp8_tile_offset(w.format, fp8_row_tiles(n), num_slabs(w.cols), row / kFp8TileRows,
                                            c / kFp8TileCols);
      uint32_t word;
      std::memcpy(&word, tile + at.word_offset(), 4);
      word |= (code & 7) << at.magnitude_bit() | code >> 3 << at.sign_bit();
      std::memcpy(tile + at.word_offset(), &word, 4);
      if (c % block == 0)
        tile[at.scale_offset(w.format)] = scale.index(w.scales[r * w.scale_stride_bytes + c / block]);
    }
  }
  return {};
}

}  // namespace

Status check_fp8_scale_span(int span) {
  if (span < kMxIndices) return {};
  return unsupported("e8m0 scales of one row span " + std::to_string(span) +
                     " octaves; exact FP8 operands hold " + std::to_string(kMxIndices - 1));
}

Status check_fp8_scales(const Fp4MatrixView& w) {
  for (int64_t r = 0; r < w.rows; ++r) FP4MOE_RETURN_IF_ERROR(row_scale(w, r).status());
  return {};
}

Status pack_fp8_tiles(const Fp4MatrixView& w, uint8_t* dst) {
  std::memset(dst, 0, static_cast<size_t>(fp8_tiled_bytes(w.format, w.rows, w.cols)));
  return put(w, RowOrder::kPlain, w.rows, dst);
}

Status pack_fp8_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst) {
  FP4MOE_RETURN_IF_ERROR(check_gate_up(gate, up));
  std::memset(dst, 0, static_cast<size_t>(fp8_tiled_bytes(gate.format, 2 * gate.rows, gate.cols)));
  FP4MOE_RETURN_IF_ERROR(put(gate, RowOrder::kGate, 2 * gate.rows, dst));
  return put(up, RowOrder::kUp, 2 * gate.rows, dst);
}

uint8_t fp8_operand(Fp4Format format, int scale_index, int magnitude) {
  const float value = e2m1_decode(static_cast<uint8_t>(magnitude));
  if (format == Fp4Format::kNvfp4)
    return e4m3_encode(value * e4m3_decode(static_cast<uint8_t>(scale_index)) * 0.125f);
  return scale_index < kMxIndices ? e4m3_encode(std::ldexp(value, kFp8MxBottom + scale_index)) : uint8_t{0};
}

float fp8_tiled_at(Fp4Format format, const uint8_t* tiles, int64_t n, int64_t k, int64_t r, int64_t c) {
  const uint8_t* tile =
      tiles + fp8_tile_offset(format, fp8_row_tiles(n), num_slabs(k), r / kFp8TileRows, c / kFp8TileCols);
  const Fp8Place at(r, c);
  uint32_t word;
  float factor;
  std::memcpy(&word, tile + at.word_offset(), 4);
  std::memcpy(&factor, tiles + fp8_row_factors_offset(format, n, k) + r * 4, 4);
  const int index = tile[at.scale_offset(format)];
  const uint8_t operand = fp8_operand(format, format == Fp4Format::kMxfp4 ? index / 8 : index,
                                      static_cast<int>(word >> at.magnitude_bit() & 7));
  const float value = e4m3_decode(operand) * factor;
  return (word >> at.sign_bit() & 1) != 0 ? -value : value;
}

}  // namespace fp4moe
