#include "kernels/cuda/layout/tile_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"

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

// A code (sign and three bits) in the low half of a register.
constexpr uint32_t in_register(uint32_t code) { return code >> 3 << 15 | (code & 7) << 6; }

// e4m3, not negative and not zero, as (e + 16) << 3 | m with subnormals normalised.
uint8_t e5m3(uint8_t e4m3) {
  int e = e4m3 >> 3, m = e4m3 & 7;
  if (e > 0) return static_cast<uint8_t>((e - 7 + 16) << 3 | m);
  e = -6;
  while ((m & 8) == 0) m <<= 1, --e;
  return static_cast<uint8_t>((e + 16) << 3 | (m & 7));
}

bool is_zero_group(const uint8_t* codes, int64_t bytes) {
  return std::all_of(codes, codes + bytes, [](uint8_t b) { return (b & 0x77) == 0; });
}

// Puts one matrix's rows into the tiles at dst, `row_tiles` of them along N, which the caller has cleared.
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

}  // namespace

Status check_gate_up(const Fp4MatrixView& gate, const Fp4MatrixView& up) {
  if (gate.rows == up.rows && gate.cols == up.cols && gate.format == up.format && gate.rows % 32 == 0)
    return {};
  return invalid_argument("gate [" + std::to_string(gate.rows) + ", " + std::to_string(gate.cols) +
                          "] and up [" + std::to_string(up.rows) + ", " + std::to_string(up.cols) +
                          "] must have the same shape, with rows a multiple of 32");
}

Status check_scale_span(int span) {
  if (span <= kMaxScaleSpan) return {};
  return unsupported("e8m0 scales of one matrix span " + std::to_string(span) + " octaves; the tiles hold " +
                     std::to_string(kMaxScaleSpan));
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

}  // namespace fp4moe
