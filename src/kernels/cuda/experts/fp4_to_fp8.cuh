// Converts FP4 tile codes (kernels/cuda/layout/fp8_tile_layout.h) to e4m3 A fragments for m64nNk32 steps, or
// to f16 A fragments for m16n8k16 steps, which hold the same values. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "formats/e4m3.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/ptx/ptx_e4m3.cuh"

namespace fp4moe {

// Returns the operand: the e4m3 byte of a magnitude (code & 7) with a scale index (MXFP4: scale byte / 8).
template <Fp4Format kFormat>
__device__ uint8_t fp8_operand_byte(int index, int magnitude) {
  const float value = magnitude < 4   ? 0.5f * magnitude
                      : magnitude < 6 ? magnitude - 2.0f
                                      : 2.0f * magnitude - 8;
  if (kFormat == Fp4Format::kNvfp4)
    return e4m3_encode(value * e4m3_decode(static_cast<uint8_t>(index)) * 0.125f);
  return index <= kFp8MxTop - kFp8MxBottom ? e4m3_encode(ldexpf(value, kFp8MxBottom + index)) : uint8_t{0};
}

// Returns the bytes of `table` that four nibbles, each at most 7, select. __byte_perm() would mask the
// nibbles.
__device__ __forceinline__ uint32_t pick_bytes(uint2 table, uint32_t nibbles) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(table.x), "r"(table.y), "r"(nibbles));
  return bytes;
}

// Unpacks the eight codes of a word, which have one scale, into the e4m3 bytes of the first four and the last
// four.
__device__ __forceinline__ void unpack(uint32_t word, uint2 table, uint32_t& first, uint32_t& last) {
  const uint32_t magnitudes = word & 0x77777777u;
  first = pick_bytes(table, magnitudes) | (word & 0x80808080u);
  last = pick_bytes(table, magnitudes >> 16) | (word * 16 & 0x80808080u);
}

// A lane's share of its warp's 16 rows of a tile: the codes and scales of rows g and g + 8.
template <Fp4Format kFormat>
struct Fp8TileWords {
  static constexpr int kScales = kFormat == Fp4Format::kMxfp4 ? 1 : 2;  // per row
  uint4 codes[2];
  uint2 tables[2][kScales];

  __device__ __forceinline__ void load(const uint8_t* tile, const uint2* table, int warp, int lane) {
    const int q = lane % 4;
    const auto* at = reinterpret_cast<const uint4*>(tile + q / 2 * kFp8HalfCodeBytes + warp * 512) +
                     fp8_piece(lane / 4, q);
    codes[0] = at[0], codes[1] = at[16];
    const uint8_t* scales = tile + kFp8CodeBytes + (warp * 32 + lane) * 2 * kScales;
    find_tables(table, kScales == 1 ? *reinterpret_cast<const uint16_t*>(scales)
                                    : *reinterpret_cast<const uint32_t*>(scales));
  }
  // scales: the lane's scale bytes in the tile. Any byte must select a valid entry, because a tile past the
  // matrix's end is not loaded and has arbitrary bytes.
  __device__ __forceinline__ void find_tables(const uint2* table, uint32_t scales) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(table);
    const auto entry = [&](uint32_t at) { return *reinterpret_cast<const uint2*>(bytes + at); };
    if constexpr (kFormat == Fp4Format::kMxfp4) {
      tables[0][0] = entry(scales & 0xf8), tables[1][0] = entry(scales >> 8 & 0xf8);
    } else {
      tables[0][0] = entry(scales * 8 & 0x3f8), tables[1][0] = entry(scales >> 5 & 0x3f8);
      tables[0][1] = entry(scales >> 13 & 0x3f8), tables[1][1] = entry(scales >> 21 & 0x3f8);
    }
  }

  __device__ __forceinline__ uint32_t word(int step, int half_row) const {
    const uint4& c = codes[half_row];
    return step == 0 ? c.x : step == 1 ? c.y : step == 2 ? c.z : c.w;
  }
  // Makes the A registers of the two m16n8k16 steps of f16 that share word `step` of each row.
  __device__ __forceinline__ void make_f16(int step, uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t bytes[2];
      unpack(word(step, h), tables[h][kScales == 1 ? 0 : step / 2], bytes[0], bytes[1]);
      ptx::widen(bytes[0], a[0][h], a[0][2 + h]);
      ptx::widen(bytes[1], a[1][h], a[1][2 + h]);
    }
  }
  // Makes the A registers of k step `step` of m64nNk32.
  __device__ __forceinline__ void make(int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unpack(word(step, h), tables[h][kScales == 1 ? 0 : step / 2], a[h], a[2 + h]);
    }
  }
};

}  // namespace fp4moe
