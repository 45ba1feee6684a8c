// The layout of token rows in device memory for kernels that fetch tiles of these rows with bulk copies.
// Plain C++.
//
// Rows [R, K] are cut into slabs, each of which has 128 bytes of every row: [ceil(row bytes / 128)][R rounded
// up to a multiple of 8][128] bytes. The 16-byte piece p of row r is at index p ^ (r % 8) (the 128-byte
// swizzle of wgmma's operands), and the bytes past K are zeros. The rows of expert e start at
// slab_first_row(), a multiple of 8, so that any tile of an expert's tokens is one block of memory in each
// slab.
#pragma once

#include <cstdint>

namespace fp4moe {

constexpr int64_t kSlabBytes = 128;  // of each row

constexpr int64_t slab_round_up(int64_t n) { return (n + 7) / 8 * 8; }
// Number of slab rows that hold any batch for num_experts experts: packed (capacity 0) with at most max_rows
// rows, or masked.
constexpr int64_t num_slab_rows(int64_t max_rows, int64_t capacity, int64_t num_experts) {
  return capacity == 0 ? slab_round_up(max_rows) + 8 * num_experts : num_experts * slab_round_up(capacity);
}
// The first row of expert `expert` in slabs; first_packed_row is offsets[expert].
constexpr int64_t slab_first_row(int64_t expert, int64_t first_packed_row, int64_t capacity) {
  return capacity == 0 ? slab_round_up(first_packed_row) + 8 * expert : expert * slab_round_up(capacity);
}
constexpr int64_t num_slabs(int64_t row_bytes) { return (row_bytes + kSlabBytes - 1) / kSlabBytes; }
constexpr int64_t slabs_bytes(int64_t rows, int64_t row_bytes) {
  return num_slabs(row_bytes) * rows * kSlabBytes;
}
// Byte offset of 16-byte piece `piece` of a row; pieces are numbered through the whole row.
constexpr int64_t slab_piece_offset(int64_t rows, int64_t row, int64_t piece) {
  return ((piece / 8 * rows + row) * 8 + ((piece % 8) ^ (row % 8))) * 16;
}

}  // namespace fp4moe
