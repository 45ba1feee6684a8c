// The weights of linear_few.cu: bf16, or e4m3 codes that are converted exactly. Device code only.
#pragma once

#include "formats/fp8_matrix.h"
#include "kernels/cuda/ptx/bf16_pair.cuh"

namespace fp4moe::few_linear {

enum class FewWeights {
  kBf16,
  kFp8Rows,   // one scale per row, or per block of rows: it multiplies the row's sum
  kFp8Blocks  // several scales per row: each multiplies the sums of its columns
};

constexpr int elem_bytes_of(FewWeights weights) { return weights == FewWeights::kBf16 ? 2 : 1; }

// Returns a lane's eight weights of a row as bf16 pairs: columns 0 to 7 from `at` on, or the first pairs of
// two words (kernels/fp8_word.h) of codes, then their second pairs: the order of x in registers.
template <FewWeights kWeights>
__device__ __forceinline__ uint4 load_eight(const uint8_t* at) {
  if constexpr (kWeights == FewWeights::kBf16) {
    return *reinterpret_cast<const uint4*>(at);
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(at), low = fp8_word_to_bf16(words.x),
                high = fp8_word_to_bf16(words.y);
    return {low.x, high.x, low.y, high.y};
  }
}

// Returns the pairs of x that belong to those weights.
template <FewWeights kWeights>
__device__ __forceinline__ uint4 load_x_of_eight(const uint8_t* at) {
  if constexpr (kWeights == FewWeights::kBf16) {
    return *reinterpret_cast<const uint4*>(at);
  } else {
    constexpr int kHalfGroupBytes = kFp8WordGroup / 2 * sizeof(bf16);
    const uint2 first = *reinterpret_cast<const uint2*>(at),
                second = *reinterpret_cast<const uint2*>(at + kHalfGroupBytes);
    return {first.x, first.y, second.x, second.y};
  }
}
// The first column of x that lane q of each four needs, of the 32 of a warp.
template <FewWeights kWeights>
__device__ __forceinline__ int first_column(int q) {
  return kWeights == FewWeights::kBf16 ? q * 8 : q / 2 * static_cast<int>(kFp8WordGroup) + q % 2 * 4;
}

// The scales that a lane of kFp8Blocks needs in a chunk: those of its rows g and g + 8, at its warp's
// columns.
struct LaneScales {
  const float *low, *high;      // of the first column block
  int column, col_block, last;  // the warp's first column in the chunk; the last column block

  // `step`: k's since the chunk's beginning. Columns past K, whose products are zeros, have the last block's
  // scale.
  __device__ __forceinline__ int block_at(int step) const { return min((column + step) / col_block, last); }
};

__device__ __forceinline__ LaneScales lane_scales(const Fp8LinearView& w, int k, int column, int low_row,
                                                  int high_row) {
  const int col_block = static_cast<int>(w.col_block), blocks = (k + col_block - 1) / col_block;
  const auto row = [&](int r) {
    return w.scales + static_cast<int64_t>(r / static_cast<int>(w.row_block)) * blocks;
  };
  return {row(low_row), row(high_row), column, col_block, blocks - 1};
}

}  // namespace fp4moe::few_linear
