// FP4 tile codes (kernels/cuda/fp8_tile_layout.h) to e4m3 A fragments of m64nNk32 steps. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "formats/e4m3.h"
#include "kernels/cuda/fp8_tile_layout.h"

namespace fp4moe {

// fp8_operand() on the device.
template <Fp4Format kFormat>
__device__ uint8_t fp8_operand_byte(int index, int magnitude) {
  const float value = magnitude < 4   ? 0.5f * magnitude
                      : magnitude < 6 ? magnitude - 2.0f
                                      : 2.0f * magnitude - 8;
  if (kFormat == Fp4Format::kNvfp4)
    return e4m3_encode(value * e4m3_decode(static_cast<uint8_t>(index)) * 0.125f);
  return index <= kFp8MxTop - kFp8MxBottom ? e4m3_encode(ldexpf(value, kFp8MxBottom + index)) : uint8_t{0};
}

// The bytes of `table` that four nibbles of at most 7 name. __byte_perm() would mask them.
__device__ __forceinline__ uint32_t pick_bytes(uint2 table, uint32_t nibbles) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(table.x), "r"(table.y), "r"(nibbles));
  return bytes;
}

// Eight codes of one word under one scale: the e4m3 bytes of the first and the last four.
__device__ __forceinline__ void unpack(uint32_t word, uint2 table, uint32_t& first, uint32_t& last) {
  const uint32_t magnitudes = word & 0x77777777u;
  first = pick_bytes(table, magnitudes) | (word & 0x80808080u);
  last = pick_bytes(table, magnitudes >> 16) | (word * 16 & 0x80808080u);
}

// What one lane holds of its warp's 16 rows of a tile, rows g and g + 8.
template <Fp4Format kFormat>
struct Fp8TileWords {
  static constexpr int kScales = kFormat == Fp4Format::kMxfp4 ? 1 : 2;  // of a row
  uint4 codes[2];
  uint2 tables[2][kScales];

  __device__ __forceinline__ void load(const uint8_t* tile, const uint2* table, int warp, int lane) {
    const auto* at = reinterpret_cast<const uint4*>(tile) + warp * 64 + lane;
    codes[0] = at[0], codes[1] = at[32];
    const auto* bytes = reinterpret_cast<const uint8_t*>(table);
    const uint8_t* scales = tile + kFp8CodeBytes + (warp * 32 + lane) * 2 * kScales;
    const auto entry = [&](uint32_t at) { return *reinterpret_cast<const uint2*>(bytes + at); };
    if constexpr (kFormat == Fp4Format::kMxfp4) {
      const uint32_t both = *reinterpret_cast<const uint16_t*>(scales);
      tables[0][0] = entry(both & 0xff), tables[1][0] = entry(both >> 8);
    } else {
      const uint32_t all = *reinterpret_cast<const uint32_t*>(scales);
      tables[0][0] = entry(all * 8 & 0x7f8), tables[1][0] = entry(all >> 5 & 0x7f8);
      tables[0][1] = entry(all >> 13 & 0x7f8), tables[1][1] = entry(all >> 21 & 0x7f8);
    }
  }

  // A registers of k step `step`.
  __device__ __forceinline__ void make(int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4& c = codes[h];
      const uint32_t word = step == 0 ? c.x : step == 1 ? c.y : step == 2 ? c.z : c.w;
      unpack(word, tables[h][kScales == 1 ? 0 : step / 2], a[h], a[2 + h]);
    }
  }
};

}  // namespace fp4moe
