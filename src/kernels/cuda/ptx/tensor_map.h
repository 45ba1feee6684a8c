// Tensor maps: describe matrices in device memory for Hopper's tensor copies (ptx::tensor_load).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fp4moe {

constexpr int64_t kTensorTileBytes = 128;  // of a tile's rows

// Describes a row-major matrix [rows, cols] of elements of 1, 2 or 4 bytes; row_stride: elements from one row
// to the next, or 0: cols. A copy takes tile_rows rows of kTensorTileBytes; elements outside of the matrix
// are zeros. In shared memory, at a multiple of 1024 bytes, piece i (of 16 bytes) of the tile's row r is in
// place i ^ r % 8 of the row's 128 bytes. The matrix and its rows begin at multiples of 16 bytes. tile_rows
// <= 256.
CUtensorMap tensor_map(const void* matrix, int element_bytes, int64_t rows, int64_t cols, int tile_rows,
                       int64_t row_stride = 0);

}  // namespace fp4moe
