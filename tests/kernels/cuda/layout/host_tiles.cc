#include "kernels/cuda/layout/host_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"

namespace fp4moe {
namespace {

// The coordinates of an element in its tile.
struct Place {
  int64_t warp, g, half_row;        // row = 16 warp + 8 half_row + g
  int64_t step, q, half_col, half;  // column = 16 step + 8 half_col + 2 q + half
  Place(int64_t r, int64_t c)
      : warp(r % 64 / 16),
        g(r % 8),
        half_row(r % 16 / 8),
        step(c % 64 / 16),
        q(c % 8 / 2),
        half_col(c % 16 / 8),
        half(c % 2) {}
  // Byte offset of the first of the two words that hold the element's step.
  int64_t words_byte() const { return ((warp * 32 + g * 4 + q) * 4 + step / 2 * 2) * 4; }
  int64_t scale_byte(Fp4Format format) const {
    const bool mx = format == Fp4Format::kMxfp4;
    return kTileCodeBytes + (warp * 8 + g) * (mx ? 4 : 8) + (mx ? step / 2 : step) * 2 + half_row;
  }
  int reg() const { return static_cast<int>(half_row + 2 * half_col); }
};

// Places a code (sign and three magnitude bits) in the low half of a register.
constexpr uint32_t in_register(uint32_t code) { return code >> 3 << 15 | (code & 7) << 6; }

// Converts a positive e4m3 byte to (e + 16) << 3 | m; subnormals are normalised.
uint8_t e5m3(uint8_t e4m3) {
  int e = e4m3 >> 3, m = e4m3 & 7;
  if (e > 0) return static_cast<uint8_t>((e - 7 + 16) << 3 | m);
  e = -6;
  while ((m & 8) == 0) m <<= 1, --e;
  return static_cast<uint8_t>((e + 16) << 3 | (m & 7));
}

// Packs one matrix's rows into the tiles at dst, which the caller has cleared; there are `row_tiles` along N.
Result<float> put(const Fp4MatrixView& w, RowOrder order, int64_t row_tiles, uint8_t* dst) {
  const bool mx = w.format == Fp4Format::kMxfp4;
  const int64_t bytes = tile_bytes(w.format), tiles_k = num_tiles(w.cols);
  int move = 0;
  if (mx) {
    ScaleRange range;
    for (int64_t r = 0; r < w.rows; ++r) range.add_row(w, r);
    FP4MOE_RETURN_IF_ERROR(check_scale_span(range.most - range.least));
    if (range.most > 0) move = kLargestTileScale - range.most;
  }
  const int block = fp4_block(w.format);
  for (int64_t r = 0; r < w.rows; ++r) {
    const int64_t row = tile_row(order, r);
    for (int64_t c = 0; c < w.cols; c += 2) {
      const unsigned pair = w.codes[r * w.code_stride_bytes + c / 2];
      const uint8_t scale = w.scales[r * w.scale_stride_bytes + c / block];
      const Place at(row, c);
      uint8_t* tile = dst + tile_index(row_tiles, tiles_k, row / kTileRows, c / kTileCols) * bytes;
      const bool zero = (mx ? scale + move < kSmallestTileScale : scale == 0);
      const unsigned keep = zero ? 0x8u : 0xfu;  // a zero keeps its sign
      TileCodePairs pairs;
      pairs.step[at.step % 2][at.reg()] = in_register(pair & 15 & keep) | in_register(pair >> 4 & keep) << 16;
      auto* words = reinterpret_cast<uint32_t*>(tile + at.words_byte());
      for (int s = 0; s < 2; ++s) words[s] |= pairs.word(s);
      if (c % block == 0)
        tile[at.scale_byte(w.format)] = mx ? static_cast<uint8_t>(zero ? kSmallestTileScale : scale + move)
                                           : (zero ? uint8_t{0} : e5m3(scale));
    }
  }
  return mx ? std::ldexp(1.0f, 126 - move) : 256.0f;
}

constexpr int kMxIndices = kFp8MxTop - kFp8MxBottom + 1;

// Maps one row's scale bytes to indices; `factor` multiplies the row's sums.
struct RowScale {
  Fp4Format format;
  int move = 0;  // added to the byte (MXFP4) or to the exponent (NVFP4)
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

// Packs one matrix's rows into the tiles at dst, which the caller has cleared.
Status put_fp8(const Fp4MatrixView& w, RowOrder order, int64_t n, uint8_t* dst) {
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

Result<float> pack_tiles(const Fp4MatrixView& w, uint8_t* dst) {
  std::memset(dst, 0, static_cast<size_t>(tiled_bytes(w.format, w.rows, w.cols)));
  return put(w, RowOrder::kPlain, num_tiles(w.rows), dst);
}

Result<GateUpFactors> pack_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst) {
  FP4MOE_RETURN_IF_ERROR(check_gate_up(gate, up));
  std::memset(dst, 0, static_cast<size_t>(tiled_bytes(gate.format, 2 * gate.rows, gate.cols)));
  GateUpFactors factors;
  FP4MOE_ASSIGN_OR_RETURN(factors.gate, put(gate, RowOrder::kGate, num_tiles(2 * gate.rows), dst));
  FP4MOE_ASSIGN_OR_RETURN(factors.up, put(up, RowOrder::kUp, num_tiles(2 * up.rows), dst));
  return factors;
}

float tiled_at(Fp4Format format, const uint8_t* tiles, int64_t n, int64_t k, int64_t r, int64_t c) {
  const int64_t index = tile_index(num_tiles(n), num_tiles(k), r / kTileRows, c / kTileCols);
  const uint8_t* tile = tiles + index * tile_bytes(format);
  const Place at(r, c);
  uint32_t words[2];
  std::memcpy(words, tile + at.words_byte(), sizeof(words));
  const uint32_t pair = tile_code_pair(words[0], words[1], static_cast<int>(at.step % 2), at.reg());
  const uint32_t half = pair >> (16 * at.half) & 0xffff, code = half >> 15 << 3 | (half >> 6 & 7);
  const unsigned byte = tile[at.scale_byte(format)];
  const unsigned bits = format == Fp4Format::kMxfp4 ? byte << 7 : (byte << 4) + 0x7280;
  constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float value =
      std::ldexp(kMagnitudes[code & 7], -126) * bf16_to_float(bf16{static_cast<uint16_t>(bits)});
  return (code & 8) != 0 ? -value : value;
}

Status pack_fp8_tiles(const Fp4MatrixView& w, uint8_t* dst) {
  std::memset(dst, 0, static_cast<size_t>(fp8_tiled_bytes(w.format, w.rows, w.cols)));
  return put_fp8(w, RowOrder::kPlain, w.rows, dst);
}

Status pack_fp8_gate_up_tiles(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* dst) {
  FP4MOE_RETURN_IF_ERROR(check_gate_up(gate, up));
  std::memset(dst, 0, static_cast<size_t>(fp8_tiled_bytes(gate.format, 2 * gate.rows, gate.cols)));
  FP4MOE_RETURN_IF_ERROR(put_fp8(gate, RowOrder::kGate, 2 * gate.rows, dst));
  return put_fp8(up, RowOrder::kUp, 2 * gate.rows, dst);
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
