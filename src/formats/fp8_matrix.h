// A view of one FP8 weight matrix: E4M3 codes with f32 scales for blocks of rows and columns.
//   value = code * scale
#pragma once

#include <cstdint>

namespace fp4moe {

// A [N, K] weight. One scale for the matrix: row_block = N, col_block = K. One for each output row: row_block
// = 1, col_block = K. Blocks of 128 x 128: 128, 128. The last block of a row or column may be short. A shard
// that cuts a block has smaller blocks: any row_block from 1 on, and a col_block that is K or a multiple of
// kFp8ColumnStep.
struct Fp8LinearView {
  const uint8_t* codes = nullptr;  // [N, K] e4m3, K contiguous; no NaN
  const float* scales = nullptr;   // [ceil(N / row_block), ceil(K / col_block)], finite, 0 or >= 2^-126
  int64_t row_block = 0, col_block = 0;
};

inline constexpr int64_t kFp8ColumnStep = 32;
inline constexpr int64_t kFp8WeightBlock = 128;  // rows and columns of a block in checkpoints

// out[c] = code * scale, rounded once, for the k columns of a row.
void fp8_dequantize_row(const Fp8LinearView& w, int64_t k, int64_t row, float* out);

}  // namespace fp4moe
