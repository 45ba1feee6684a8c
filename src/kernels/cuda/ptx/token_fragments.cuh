// A warp's 16 tokens, as wgmma's register operand, from tiles of f32 that tensor copies brought. Device code
// only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx/tensor_map.h"

namespace fp4moe {

// Reads m16n8k16 fragments from tiles of 32 columns (tensor_map()). The rows of a fragment are the tokens in
// another order, so that the 4 rows that half a warp reads at once are in different banks: row g of each 8 is
// the token of token_of_row(g).
class TokenFragments {
 public:
  // warp: of the tile's 16 tokens each.
  __device__ __forceinline__ explicit TokenFragments(int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = token_of_row(lane / 4), q = lane % 4;
    own_ = (warp * 16 + row) * kRowBytes + (q / 2 ^ row) * 16 + q % 2 * 8;
  }
  // The tokens, even ones before odd ones, of rows g.
  static __device__ __forceinline__ int token_of_row(int g) { return g % 4 * 2 + g / 4; }

  // The lane's two elements of register i (0 to 3) of columns 16 step ... 16 step + 15.
  __device__ __forceinline__ float2 pair(const uint8_t* tile, int step, int i) const {
    const uint32_t at = (own_ ^ (step * 64 + i / 2 * 32)) + i % 2 * 8 * kRowBytes;
    return *reinterpret_cast<const float2*>(tile + at);
  }

 private:
  static constexpr int kRowBytes = static_cast<int>(kTensorTileBytes);
  uint32_t own_;  // offset of the lane's row and first columns in the tile
};

}  // namespace fp4moe
