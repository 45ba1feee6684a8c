// Orders of 4-bit weights [N, K] and their scales for Hopper's mixed-input GEMMs, as in the prepacked tensors
// of other engines. All are bijections within one expert's matrix, without padding.
#pragma once

#include <cstdint>

#include "formats/scale_layout.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Units of 16 rows x 64 K. A 32-bit word of the result holds one thread's operand data of rows r and r + 8,
// so that an ldmatrix.x4 of 16 rows x 32 bytes feeds consecutive WGMMAs.
enum class Sm90WeightOrder : uint8_t {
  // k16 WGMMAs with bf16. The bits of each half-word's four codes are spread so that shifts and masks give
  // bf16 values.
  kFp4Bf16,
  // k32 WGMMAs with fp8. Sign bits are moved: code i has its sign in bit 7 of byte i for i < 4, and in bit 3
  // of byte i - 4 for i >= 4.
  kFp4Fp8,
  // Like kFp4Fp8, but signs are not moved.
  kInt4Fp8,
};

// Reorders src into dst of the same size; no overlap. src is [n, k / 2] bytes, row-major, with two codes per
// byte, the even one in the low nibble. Returns kInvalidArgument unless n is a multiple of 16 and k of 64.
Status sm90_interleave_weight(Sm90WeightOrder order, const uint8_t* src, int64_t n, int64_t k, uint8_t* dst);
// The inverse of sm90_interleave_weight().
Status sm90_deinterleave_weight(Sm90WeightOrder order, const uint8_t* src, int64_t n, int64_t k,
                                uint8_t* dst);

// E8M0 scales, one per 32 K; for convert_scales(). "Folded": [N/64, K/128] of [16, 4, 4] =
// (r % 16, r % 64 / 16, g % 4), so that the scales of a 64 x 128 block of weights are 256 contiguous bytes.
struct Sm90FoldedScales {
  static constexpr const char* kName = "sm90_folded";
  int64_t rows = 0, groups = 0;  // multiples of 64 and 4

  // Returns kInvalidArgument unless rows is a multiple of 64 and groups of 4.
  static Result<Sm90FoldedScales> make(int64_t rows, int64_t groups);
  constexpr int64_t num_bytes() const { return rows * groups; }
  constexpr int64_t offset(int64_t r, int64_t g) const {
    return (r / 64 * (groups / 4) + g / 4) * 256 + r % 16 * 16 + r % 64 / 16 * 4 + g % 4;
  }
};

// The older layout, [K/128, N, 4].
struct Sm90ColumnScales {
  static constexpr const char* kName = "sm90_columns";
  int64_t rows = 0, groups = 0;  // groups is a multiple of 4

  static Result<Sm90ColumnScales> make(int64_t rows, int64_t groups);
  constexpr int64_t num_bytes() const { return rows * groups; }
  constexpr int64_t offset(int64_t r, int64_t g) const { return g / 4 * (rows * 4) + r * 4 + g % 4; }
};

}  // namespace fp4moe
