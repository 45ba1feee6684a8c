// Converts tiles (kernels/cuda/layout/tile_layout.h) to bf16 A fragments for m64nNk16 or m16n8k16 steps.
// Device code only.
#pragma once

#include <cstdint>

#include "formats/fp4_matrix.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/ptx/bf16_pair.cuh"

namespace fp4moe {

// Sets a[r] to A register r of step `step` (0 or 1, of the two steps that share the words): codes * 2^-126.
// Like tile_code_pair(), but with one instruction for the word of remaining bits.
__device__ __forceinline__ void decode_codes(uint32_t first, uint32_t second, int step, uint32_t (&a)[4]) {
  uint32_t rest;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(rest) : "r"(first), "r"(kTileRestMask), "r"(second * 4));
  const uint32_t word = step == 0 ? first : second;
  a[0] = word & kTileCodeMask;
  a[1] = word * 16 & kTileCodeMask;
  a[2] = rotate_left(word, 10) & kTileCodeMask;
  a[3] = (step == 0 ? rest * 64 : rotate_left(rest, 12)) & kTileCodeMask;
}

// A lane's share of its warp's 16 rows of a tile: a word of 8 codes per k step, and its rows' scales.
template <Fp4Format kFormat>
struct TileWords {
  uint4 codes;
  uint32_t scales[kFormat == Fp4Format::kMxfp4 ? 1 : 2];

  // tile: in shared or global memory; warp: 0 ... 3.
  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    codes = reinterpret_cast<const uint4*>(tile)[warp * 32 + lane];
    const uint8_t* s = tile + kTileCodeBytes + (warp * 8 + lane / 4) * static_cast<int>(sizeof(scales));
    if constexpr (kFormat == Fp4Format::kMxfp4) {
      scales[0] = *reinterpret_cast<const uint32_t*>(s);
    } else {
      const uint2 both = *reinterpret_cast<const uint2*>(s);
      scales[0] = both.x, scales[1] = both.y;
    }
  }

  // Returns the pair of bf16 by which row g + 8 * half_row is multiplied in k step `step`.
  __device__ __forceinline__ uint32_t scale(int step, int half_row) const {
    const int byte = kFormat == Fp4Format::kMxfp4 ? step / 2 * 2 + half_row : step % 2 * 2 + half_row;
    const uint32_t word = scales[kFormat == Fp4Format::kMxfp4 ? 0 : step / 2];
    const uint32_t both = __byte_perm(word, 0, 0x4040 | byte << 8 | byte);
    return kFormat == Fp4Format::kMxfp4 ? both * 128 : both * 16 + 0x72807280;
  }

  // Sets a to the A registers of k step `step`. Steps 0 and 1 share work, as do steps 2 and 3.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    decode_codes(step < 2 ? codes.x : codes.z, step < 2 ? codes.y : codes.w, step % 2, a);
    const uint32_t low = scale(step, 0), high = scale(step, 1);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = bf16x2_mul(a[r], r % 2 == 0 ? low : high);
  }
};

// bf16 weights: the registers are in the tile, which must stay in memory until the last decode().
template <>
struct TileWords<Fp4Format::kNone> {
  const uint4* steps;

  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    steps = reinterpret_cast<const uint4*>(tile) + warp * 128 + lane;
  }
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    const uint4 words = steps[step * 32];
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  }
};

}  // namespace fp4moe
