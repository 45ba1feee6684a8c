// The layout of FP4 and bf16 expert weights in device memory for the tensor cores of SM80 to SM90: tiles of
// 64 rows x 64 columns, each a contiguous block of codes followed by scales. Exact and invertible; plain C++.
// tile_pack.cu packs the tiles on the GPU, tests/kernels/cuda/layout/host_tiles.h on the host.
//
// A matrix [N, K] is stored as ceil(N / 64) x ceil(K / 64) tiles, padded with zero codes. Eight row tiles are
// contiguous, [ceil(N / 512)][ceil(K / 64)][tiles of the group: 8, fewer in the last] (tile_index()), so that
// a GEMM block fetches its tiles of 64 columns with one copy. A tile serves 4 warps, warp w with rows
// 16 w ... 16 w + 15, as the A operand of four m16n8k16 (mma.sync) or m64nNk16 (wgmma) steps.
//
// Codes: [4 warps][32 lanes][4 words]; words 2 p and 2 p + 1 belong to k steps 2 p and 2 p + 1 (step s:
// columns 16 s ... 16 s + 15). With g = lane / 4 and q = lane % 4, these words hold the lane's 8 codes of
// each step. The code for half h (0: the low 16 bits) of A register r is the one in
//   row 16 w + g + 8 (r % 2), column 16 s + 2 q + 8 (r / 2) + h
// A register holds a pair of codes as two bf16 of value code * 2^-126: in each half, the sign is bit 15 and
// the other bits are bits 8 ... 6 (kTileCodeMask). Registers 0, 1 and 2 are in their step's word, rotated
// right by 0, 4 and 10 bits. Bits 0, 1, 9 and 10 of each half are left over; those of the first word and
// those of the second, shifted left by 2, form a word that holds register 3 of both steps, rotated right by 6
// bits (first step) and 12 bits (second).
//
// Scales: [4 warps][8 g][bytes], one byte for each row and group of columns:
//   MXFP4: 4 bytes: (g, group 0), (g + 8, group 0), (g, group 1), (g + 8, group 1); groups of 32 columns
//   NVFP4: 8 bytes: (g, step s), (g + 8, step s) for s = 0 ... 3; groups of 16 columns
// A byte determines the bits of the bf16 by which the codes are multiplied:
//   MXFP4: byte << 7; the byte is the e8m0 byte plus an offset that makes the matrix's largest byte 253
//   NVFP4: (byte << 4) + 0x7280, byte = (e + 16) << 3 | m for the scale (1 + m / 8) 2^e; in a group whose
//          scale is zero, all codes are zero
// The product with the codes is exact in bf16; multiplied by the matrix's factor, a power of two, it is the
// weight without its tensor scale.
//
// bf16 weights (Fp4Format::kNone) have tiles of [4 warps][4 k steps][32 lanes][4 A registers], each a pair of
// bf16 in the place of its codes (bf16_tile_place()); no scales.
//
// Gate and up share tiles: matrix row 64 j + 16 w + g is gate row 32 j + 8 w + g, and matrix row
// 64 j + 16 w + g + 8 is the same row of up; with either instruction, one thread holds both rows. I, the
// number of gate rows, must be a multiple of 32.
#pragma once

#include <cstdint>

#include "formats/fp4_matrix.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr int64_t kTileRows = 64, kTileCols = 64;
constexpr int64_t kTileCodeBytes = kTileRows * kTileCols / 2;

constexpr int64_t tile_scale_bytes(Fp4Format format) { return kTileRows * kTileCols / fp4_block(format); }
constexpr int64_t tile_bytes(Fp4Format format) {
  return format == Fp4Format::kNone ? kTileRows * kTileCols * 2 : kTileCodeBytes + tile_scale_bytes(format);
}
// Index of the element at (row, col) of a bf16 tile.
constexpr int64_t bf16_tile_place(int64_t row, int64_t col) {
  const int64_t warp = row / 16, lane = row % 8 * 4 + col % 8 / 2, step = col / 16;
  const int64_t a_register = row % 16 / 8 + col % 16 / 8 * 2;
  return (((warp * 4 + step) * 32 + lane) * 4 + a_register) * 2 + col % 2;
}
// Range of the e8m0 bytes in tiles. In this range every product is a normal bf16; its width limits the span
// of a matrix's scales.
constexpr int kLargestTileScale = 253, kSmallestTileScale = 129;
constexpr int kMaxScaleSpan = kLargestTileScale - kSmallestTileScale;
constexpr int64_t num_tiles(int64_t n) { return (n + 63) / 64; }
constexpr int64_t kTileGroup = 8;
// Number of row tiles in the contiguous group that contains row tile `row_tile`, if there are `row_tiles`.
constexpr int64_t tile_group_size(int64_t row_tiles, int64_t row_tile) {
  const int64_t left = row_tiles - row_tile / kTileGroup * kTileGroup;
  return left < kTileGroup ? left : kTileGroup;
}
// Index in memory of tile (row_tile, k_tile) in a matrix of row_tiles x k_tiles tiles.
constexpr int64_t tile_index(int64_t row_tiles, int64_t k_tiles, int64_t row_tile, int64_t k_tile) {
  const int64_t first = row_tile / kTileGroup * kTileGroup;
  return first * k_tiles + k_tile * tile_group_size(row_tiles, row_tile) + row_tile - first;
}
// Size in bytes of the tiles of an [N, K] matrix.
constexpr int64_t tiled_bytes(Fp4Format format, int64_t n, int64_t k) {
  return num_tiles(n) * num_tiles(k) * tile_bytes(format);
}

// The order of a matrix's rows in the tiles: row i is row tile_row(order, i) of the tiles.
enum class RowOrder : uint8_t { kPlain, kGate, kUp };
constexpr int64_t tile_row(RowOrder order, int64_t i) {
  if (order == RowOrder::kPlain) return i;
  return i / 32 * 64 + i % 32 / 8 * 16 + i % 8 + (order == RowOrder::kUp ? 8 : 0);
}
// Returns kInvalidArgument unless both have the same shape and format and a multiple of 32 rows.
Status check_gate_up(const Fp4MatrixView& gate, const Fp4MatrixView& up);

// Range of the scale bytes of the groups that contain a nonzero code.
struct ScaleRange {
  int least = 255, most = 0;
  void add_row(const Fp4MatrixView& w, int64_t row);
};
// Returns kUnsupported if scales `span` octaves apart are not allowed in an MXFP4 matrix.
Status check_scale_span(int span);

constexpr uint32_t kTileCodeMask = 0x81c081c0;
constexpr uint32_t kTileRestMask = 0x06030603;  // the bits of a word that registers 0 to 2 do not use

constexpr uint32_t rotate_left(uint32_t v, int bits) { return bits == 0 ? v : v << bits | v >> (32 - bits); }

// Packs the pairs of codes of two steps, in register position (kTileCodeMask), into each step's word.
struct TileCodePairs {
  uint32_t step[2][4] = {};

  constexpr uint32_t word(int s) const {
    const uint32_t rest = rotate_left(step[0][3], 32 - 6) | rotate_left(step[1][3], 32 - 12);
    return step[s][0] | rotate_left(step[s][1], 32 - 4) | rotate_left(step[s][2], 32 - 10) |
           (s == 0 ? rest & kTileRestMask : (rest & ~kTileRestMask) >> 2);
  }
};
// The inverse: returns register r of step s from both words.
constexpr uint32_t tile_code_pair(uint32_t first, uint32_t second, int s, int r) {
  const uint32_t word = s == 0 ? first : second;
  const uint32_t rest = (first & kTileRestMask) | (second * 4 & ~kTileRestMask);
  const uint32_t rotated = r == 0   ? word
                           : r == 1 ? word * 16
                           : r == 2 ? rotate_left(word, 10)
                           : s == 0 ? rest * 64
                                    : rotate_left(rest, 12);
  return rotated & kTileCodeMask;
}

}  // namespace fp4moe
