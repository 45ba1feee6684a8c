// A view of one FP4 weight matrix (MXFP4 or NVFP4) in the linear layout of checkpoints.
#pragma once

#include <cstdint>

#include "formats/bf16.h"

namespace fp4moe {

enum class Fp4Format : uint8_t {
  // Blocks of 32 along K with e8m0 scales, no tensor scale: w = code * block scale.
  kMxfp4,
  // Blocks of 16 along K with e4m3 scales, one f32 tensor scale: w = code * block scale * tensor scale.
  kNvfp4,
  // Not FP4: bf16 weights of an unquantised checkpoint. Never the format of a Fp4MatrixView.
  kNone,
};

// Block size along K. kNone has no blocks, but is sharded in MXFP4's block size.
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

// [rows, cols] e2m1 codes, two per byte, the even column in the low nibble; one scale byte per block of
// fp4_block(format) columns. Strides allow views of every second row (gate or up of an interleaved W13).
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

// Columns [first, first + count) of m; both numbers are multiples of the block.
constexpr Fp4MatrixView column_slice(Fp4MatrixView m, int64_t first, int64_t count) {
  m.codes += first / 2;
  m.scales += first / fp4_block(m.format);
  m.cols = count;
  return m;
}

// Element (r, c): code * block scale is exact in f32, and its product with tensor_scale is rounded once. E8m0
// bytes 253 and 254 overflow to infinity with codes that reach 2^128.
float fp4_at(const Fp4MatrixView& m, int64_t r, int64_t c);

// out[c] = fp4_at(m, row, c) for all columns, bit-identical.
void fp4_dequantize_row(const Fp4MatrixView& m, int64_t row, float* out);

}  // namespace fp4moe
