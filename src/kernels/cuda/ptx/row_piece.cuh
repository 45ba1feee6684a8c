// Eight columns of a row in a thread's registers, converted from and to bf16 or f32 memory. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "formats/bf16.h"

namespace fp4moe::cuda {

constexpr int kPieceColumns = 8;

struct RowPiece {
  float v[kPieceColumns];
};

__device__ __forceinline__ RowPiece unpack_piece(const float4& a, const float4& b) {
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
// `bits`: eight bf16.
__device__ __forceinline__ RowPiece unpack_piece(const uint4& bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  RowPiece piece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    piece.v[2 * i] = __uint_as_float(words[i] << 16);
    piece.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
  }
  return piece;
}

// `p` must be aligned to 16 bytes.
__device__ __forceinline__ void store_piece(float* p, const RowPiece& s) {
  auto* const v = reinterpret_cast<float4*>(p);
  v[0] = {s.v[0], s.v[1], s.v[2], s.v[3]};
  v[1] = {s.v[4], s.v[5], s.v[6], s.v[7]};
}
__device__ __forceinline__ void store_piece(bf16* p, const RowPiece& s) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(s.v[2 * i], s.v[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(pairs);
}

// sum += weight * piece, with one rounding per column.
__device__ __forceinline__ void add_scaled(RowPiece& sum, float weight, const RowPiece& piece) {
#pragma unroll
  for (int i = 0; i < kPieceColumns; ++i) sum.v[i] = fmaf(weight, piece.v[i], sum.v[i]);
}

}  // namespace fp4moe::cuda
