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

// Eight columns as they are stored, for loads that must not wait for each other's conversion. The loads
// bypass L1, because other GPUs write some of this memory.
struct F32Raw {
  float4 low, high;
};
__device__ __forceinline__ F32Raw load_raw(const float* p, int vector) {
  const auto* const v = reinterpret_cast<const float4*>(p) + 2 * int64_t{vector};
  return {__ldcg(v), __ldcg(v + 1)};
}
__device__ __forceinline__ uint4 load_raw(const bf16* p, int vector) {
  return __ldcg(reinterpret_cast<const uint4*>(p) + vector);
}
__device__ __forceinline__ RowPiece to_piece(const F32Raw& raw) { return unpack_piece(raw.low, raw.high); }
__device__ __forceinline__ RowPiece to_piece(const uint4& raw) { return unpack_piece(raw); }

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
