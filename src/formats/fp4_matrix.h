// A view of one FP4 weight matrix in either block format, in the linear layout of checkpoints.
#pragma once

#include <cstdint>

#include "formats/bf16.h"

namespace fp4moe {

enum class Fp4Format : uint8_t {
  kMxfp4,  // blocks of 32 along K, e8m0 scale, no tensor scale
  kNvfp4,  // blocks of 16 along K, e4m3 scale, one f32 tensor scale (decode direction: w = code * block *
           // tensor)
  kNone,   // not FP4: the bf16 weights of a checkpoint that was not quantised; no Fp4MatrixView has it
};

// kNone has no blocks, but is cut as if it had MXFP4's.
constexpr int fp4_block(Fp4Format format) { return format == Fp4Format::kNvfp4 ? 16 : 32; }
constexpr const char* fp4_format_name(Fp4Format format) {
  switch (format) {
    case Fp4Format::kMxfp4:
      return "mxfp4";
    case Fp4Format::kNvfp4:
      return "nvfp4";
    case Fp4Format::kNone:
      return "bf16";
  }
  return "unknown";
}

// [rows, cols] e2m1 codes, two in a byte, the even column in the low nibble; one scale byte per block of
// fp4_block(format) columns. Strides let a view pick every second row (gate or up of an interleaved W13).
struct Fp4MatrixView {
  Fp4Format format = Fp4Format::kMxfp4;
  int64_t rows = 0, cols = 0;       // cols is a multiple of the block
  const uint8_t* codes = nullptr;   // row r starts at codes + r * code_stride_bytes
  const uint8_t* scales = nullptr;  // row r starts at scales + r * scale_stride_bytes
  int64_t code_stride_bytes = 0;    // >= cols / 2
  int64_t scale_stride_bytes = 0;   // >= cols / fp4_block
  float tensor_scale = 1;           // decode direction; 1 for kMxfp4
};

// Rows [first, first + count) of m.
constexpr Fp4MatrixView row_slice(Fp4MatrixView m, int64_t first, int64_t count) {
  m.codes += first * m.code_stride_bytes;
  m.scales += first * m.scale_stride_bytes;
  m.rows = count;
  return m;
}

// Columns [first, first + count) of m: whole blocks.
constexpr Fp4MatrixView column_slice(Fp4MatrixView m, int64_t first, int64_t count) {
  m.codes += first / 2;
  m.scales += first / fp4_block(m.format);
  m.cols = count;
  return m;
}

// Element (r, c): code * block scale is exact in f32, its product with tensor_scale is rounded once (and
// overflows to infinity for e8m0 bytes 253 and 254 with codes that reach 2^128).
float fp4_at(const Fp4MatrixView& m, int64_t r, int64_t c);

// Row `row`: out[c] = fp4_at(m, row, c) for all cols, bit for bit.
void fp4_dequantize_row(const Fp4MatrixView& m, int64_t row, float* out);

}  // namespace fp4moe
