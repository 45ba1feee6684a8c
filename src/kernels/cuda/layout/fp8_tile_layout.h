// The layout of FP4 weights and FP8 activations in device memory for w4a8 on SM90. Plain C++. One layout
// serves both the FP8 tensor cores (m64nNk32, many tokens) and m16n8k16 steps of f16 (few tokens), because an
// e4m3 operand is exact in f16.
//
// Columns. A k step of the matrix unit covers 32 of a slab's 128 columns, which can be any 32 if weights and
// tokens use the same ones: column c of a slab is byte 4 q + b of 16-byte piece j, with q = c / 32,
// j = c % 32 / 4 and b = c % 4; step s uses pieces 2 s and 2 s + 1. So the thread that has bytes 4 q ...
// 4 q + 3 of every piece has 32 adjacent columns, which share one scale (MXFP4) or two scales (NVFP4).
//
// Weights. A matrix [N, K] is stored as ceil(N / 64) x ceil(K / 128) tiles of 64 rows x 128 columns, padded
// with zero codes, in the order of tile_index() (tile_layout.h: eight row tiles are one block of memory),
// followed by [N rounded up to a multiple of 64] f32 row factors. A weight is e4m3(code, scale index) * row
// factor * tensor scale: the e4m3 value is an operand of m64nNk32, and the row factors are applied to the
// sums.
//
// Tile: first the codes, [2 column halves][4 warps][2 row halves][16 pieces][4 steps] words. In row
// 16 w + 8 h + g, code i of step s of lane 4 g + q is column 32 q + 8 s + i. The lane's 16 bytes are piece
// fp8_piece(g, q) of column half q / 2, so that a last slab of at most 64 columns can be read without its
// second half, and the lanes of a warp read shared memory without bank conflicts. A word serves two m16n8k16
// steps of f16, codes 0 ... 3 the first and codes 4 ... 7 the second; each pair of codes becomes a register.
// The magnitude of code i is in bits 4 i ... 4 i + 2, so that half a word is the selector of a byte permute;
// its sign is bit 8 i + 7 if i < 4, otherwise bit 8 (i - 4) + 3.
// Then the scale indices, [4 warps][32 lanes][bytes]:
//   MXFP4: 2 bytes, one for each row half: 8 (j + 8) for a scale of 2^j. The magnitudes times 2^j,
//          j = -8 ... 6, are exact in e4m3 (subnormals too); the row factor is the power of two that turns
//          2^6 into the row's largest scale. A row is rejected if the scales of its nonzero groups span
//          more octaves.
//   NVFP4: 4 bytes, the one for half c of the lane's columns and row half h at 2 c + h: the scale in e4m3
//          times a power of two, the largest with which all scales of the row fit in e4m3. The operand is
//          e4m3(magnitude * scale / 8), rounded: 1.5, 3 and 6 times a scale have up to six significand bits.
//          Relative L2 error for normally distributed weights: 2.2 % (test); of FP4 itself: 9 %.
//
// Each thread has matching rows of gate and up, as in tile_layout.h: matrix row 64 j + 16 w + g is gate row
// 32 j + 8 w + g, and matrix row 64 j + 16 w + g + 8 is the same row of up.
//
// Activations. Codes [R, K] are stored in slabs (token_slabs.h) of 128 columns, in the column order above.
#pragma once

#include <cstdint>

#include "formats/fp4_matrix.h"
#include "fp4moe/status.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/layout/token_slabs.h"

namespace fp4moe {

constexpr int64_t kFp8TileRows = 64, kFp8TileCols = kSlabBytes;
constexpr int64_t kFp8CodeBytes = kFp8TileRows * kFp8TileCols / 2;
constexpr int kFp8MxTop = 6, kFp8MxBottom = -8;  // range of j in which magnitudes * 2^j are exact in e4m3

constexpr int64_t fp8_tile_bytes(Fp4Format format) {
  return kFp8CodeBytes + kFp8TileRows * kFp8TileCols / fp4_block(format);
}
constexpr int64_t fp8_row_tiles(int64_t n) { return (n + kFp8TileRows - 1) / kFp8TileRows; }
// Byte offset of the row factors of an [N, K] matrix, and the size of the matrix in bytes.
constexpr int64_t fp8_row_factors_offset(Fp4Format format, int64_t n, int64_t k) {
  return fp8_row_tiles(n) * num_slabs(k) * fp8_tile_bytes(format);
}
constexpr int64_t fp8_tiled_bytes(Fp4Format format, int64_t n, int64_t k) {
  return fp8_row_factors_offset(format, n, k) + fp8_row_tiles(n) * kFp8TileRows * 4;
}

// Byte offset of tile (row_tile, slab) in a matrix of row_tiles x slabs tiles.
constexpr int64_t fp8_tile_offset(Fp4Format format, int64_t row_tiles, int64_t slabs, int64_t row_tile,
                                  int64_t slab) {
  return tile_index(row_tiles, slabs, row_tile, slab) * fp8_tile_bytes(format);
}
constexpr int kFp8HalfCodeBytes = kFp8CodeBytes / 2;  // codes of 64 columns
// Index of a lane's 16-byte piece among the 16 pieces of its column half, warp and row half.
constexpr int fp8_piece(int g, int q) { return (2 * g + q % 2) ^ (q / 2 * 4); }

// The place of element (r, c) in its tile.
struct Fp8Place {
  int64_t warp, half_row, g;  // row = 16 warp + 8 half_row + g
  int64_t q, step;            // column = 32 q + 8 step + code
  int code;
  constexpr Fp8Place(int64_t r, int64_t c)
      : warp(r % 64 / 16),
        half_row(r % 16 / 8),
        g(r % 8),
        q(c % 128 / 32),
        step(c % 32 / 8),
        code(static_cast<int>(c % 8)) {}
  constexpr int64_t word_offset() const {
    const int piece = fp8_piece(static_cast<int>(g), static_cast<int>(q));
    return ((((q / 2 * 4 + warp) * 2 + half_row) * 16 + piece) * 4 + step) * 4;
  }
  constexpr int magnitude_bit() const { return 4 * code; }
  constexpr int sign_bit() const { return code < 4 ? 8 * code + 7 : 8 * (code - 4) + 3; }
  constexpr int64_t scale_offset(Fp4Format format) const {
    const int64_t lane = warp * 32 + g * 4 + q;
    return kFp8CodeBytes +
           (format == Fp4Format::kMxfp4 ? 2 * lane + half_row : 4 * lane + step / 2 * 2 + half_row);
  }
};

// Returns kUnsupported if scales `span` octaves apart are not allowed in a row of an MXFP4 matrix.
Status check_fp8_scale_span(int span);
// Applies check_fp8_scale_span() to all rows of w.
Status check_fp8_scales(const Fp4MatrixView& w);

// Byte offset of element (row, k) of the activations.
constexpr int64_t fp8_slab_offset(int64_t slab_rows, int64_t row, int64_t k) {
  return slab_piece_offset(slab_rows, row, k / 128 * 8 + k % 32 / 4) + k % 128 / 32 * 4 + k % 4;
}

}  // namespace fp4moe
