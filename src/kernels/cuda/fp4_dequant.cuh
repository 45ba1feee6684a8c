// FP4 tile codes (kernels/cuda/tile_layout.h) to bf16 A fragments of m64nNk16 or m16n8k16 steps. Device code
// only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "formats/fp4_matrix.h"
#include "kernels/cuda/tile_layout.h"

namespace fp4moe {

__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}

// What one lane holds of its warp's 16 rows of a tile: a word of 8 codes per k step, and its rows' scales.
template <Fp4Format kFormat>
struct TileWords {
  uint4 codes;
  uint32_t scales[kFormat == Fp4Format::kMxfp4 ? 1 : 2];

  // tile: in shared memory; warp: 0 ... 3.
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

  // The pair of bf16 that multiplies row g + 8 `half_row` in k step `step`.
  __device__ __forceinline__ uint32_t scale(int step, int half_row) const {
    const int byte = kFormat == Fp4Format::kMxfp4 ? step / 2 * 2 + half_row : step % 2 * 2 + half_row;
    const uint32_t word = scales[kFormat == Fp4Format::kMxfp4 ? 0 : step / 2];
    const uint32_t both = __byte_perm(word, 0, 0x4040 | byte << 8 | byte);
    return kFormat == Fp4Format::kMxfp4 ? both * 128 : both * 16 + 0x72807280;
  }

  // A registers of k step `step`.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    constexpr uint32_t kMask = 0x81c081c0;
    const uint32_t w = step == 0 ? codes.x : step == 1 ? codes.y : step == 2 ? codes.z : codes.w;
    const uint32_t low = scale(step, 0), high = scale(step, 1);
    a[0] = bf16x2_mul(w & kMask, low);
    a[1] = bf16x2_mul(w * 8 & kMask, high);
    a[2] = bf16x2_mul(w * 64 & kMask, low);
    a[3] = bf16x2_mul((w * 2 & 0x80008000) | (w >> 3 & 0x01800180) | (w >> 7 & 0x00400040), high);
  }
};

}  // namespace fp4moe
