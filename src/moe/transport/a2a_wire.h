// Wire formats of a row of H activations or results.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "formats/tensor_scale.h"
#include "kernels/ops.h"

namespace fp4moe {

enum class WireFormat : uint8_t {
  kF32,       // H f32
  kBf16,      // H bf16
  kFp8Block,  // H e4m3 codes, then the f32 scales of their groups (formats/fp8.h); H must be a multiple of 4
  kFp8Plain,  // H e4m3 codes from a saturating cast, no scale
  kNvfp4,     // H / 2 bytes of codes, H / 16 block scales (e4m3), an f32 tensor scale (decode direction)
};

// Bytes of a row of `cols` elements; kNvfp4: cols must be a multiple of 16.
int64_t wire_row_bytes(WireFormat format, int64_t cols);

struct WireEncoder {
  WireFormat format = WireFormat::kBf16;
  bool nvfp4_per_token = false;  // kNvfp4: a tensor scale per row instead of nvfp4_scale
  EncodeScale nvfp4_scale;

  // Encodes x [cols] of `dtype` (kBF16 or kF32) to wire [wire_row_bytes()], which must be 4-byte aligned.
  void encode(const void* x, DType dtype, int64_t cols, uint8_t* wire) const;
};

// Decodes `wire` into out [cols] of dtype. Returns the factor by which the caller must still multiply each
// element: the row's tensor scale with kNvfp4 (out = code * block scale, exact in both dtypes), else 1.
// kFp8Block values are rounded to dtype.
float decode_wire_row(WireFormat format, const uint8_t* wire, int64_t cols, DType dtype, void* out);

// sum[i] += weight * row[first + i] for n elements; kF32, kBf16 and kFp8Plain only.
void add_wire_row(WireFormat format, const uint8_t* wire, int64_t first, int64_t n, float weight, float* sum);

}  // namespace fp4moe
