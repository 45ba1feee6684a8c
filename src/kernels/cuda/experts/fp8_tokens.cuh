// FP8 tokens (formats/fp8.h, fp8_quantize_token): a row's scale, and values as e4m3 codes or as f16, which
// holds them exactly. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx/ptx_e4m3.cuh"

namespace fp4moe {

struct Fp8Scale {
  float scale, inverse;

  // most: max |x| of the row, ignoring NaN elements.
  __device__ __forceinline__ explicit Fp8Scale(float most) {
    scale = __fdiv_rn(fminf(most, 3.402823466e38f), 448.0f);
    if (scale < 0x1p-126f) scale = 0;
    inverse = scale == 0 ? 0 : __frcp_rn(scale);
  }
};

// Returns the e4m3 values of a pair of bf16 times `inverse`, as a pair of f16.
__device__ __forceinline__ uint32_t fp8_pair_as_f16(uint32_t bf16_pair, float inverse) {
  const uint32_t codes = ptx::e4m3_pair(__uint_as_float(bf16_pair << 16) * inverse,
                                        __uint_as_float(bf16_pair & 0xffff0000u) * inverse);
  uint32_t pair;
  asm("{.reg .b16 codes; cvt.u16.u32 codes, %1; cvt.rn.f16x2.e4m3x2 %0, codes;}" : "=r"(pair) : "r"(codes));
  return pair;
}
__device__ __forceinline__ uint4 fp8_piece_as_f16(const uint4& v, float inverse) {
  return {fp8_pair_as_f16(v.x, inverse), fp8_pair_as_f16(v.y, inverse), fp8_pair_as_f16(v.z, inverse),
          fp8_pair_as_f16(v.w, inverse)};
}

// Returns the maximum of `most` and |x| of a pair of bf16; NaN elements are ignored.
__device__ __forceinline__ float most_of_pair(uint32_t bf16_pair, float most) {
  return fmaxf(fmaxf(most, fabsf(__uint_as_float(bf16_pair << 16))),
               fabsf(__uint_as_float(bf16_pair & 0xffff0000u)));
}
__device__ __forceinline__ float most_of_piece(const uint4& v, float most) {
  return most_of_pair(v.w, most_of_pair(v.z, most_of_pair(v.y, most_of_pair(v.x, most))));
}
// Returns the maximum of v over the lanes of `mask`; v must not be negative.
__device__ __forceinline__ float most_of_lanes(uint32_t mask, float v) {
  return __uint_as_float(__reduce_max_sync(mask, __float_as_uint(v)));
}

// Converts a row of bf16 to the f16 values of its codes, and sets its scale; `to` may be `from`. Called by a
// whole warp; cols is a multiple of 8, and both rows are 16-byte aligned.
__device__ inline void fp8_row_as_f16(const uint4* from, int cols, uint4* to, float* scale) {
  constexpr int kHeld = 12;  // pieces that a lane keeps: 3072 columns
  const int lane = threadIdx.x % 32, pieces = cols / 8;
  uint4 held[kHeld];
  float most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = {0, 0, 0, 0};
    if (lane + 32 * i < pieces) held[i] = from[lane + 32 * i];
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most = most_of_piece(held[i], most);
  for (int piece = lane + 32 * kHeld; piece < pieces; piece += 32) most = most_of_piece(from[piece], most);
  const Fp8Scale row(most_of_lanes(~0u, most));
  if (lane == 0) *scale = row.scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (lane + 32 * i < pieces) to[lane + 32 * i] = fp8_piece_as_f16(held[i], row.inverse);
  for (int piece = lane + 32 * kHeld; piece < pieces; piece += 32)
    to[piece] = fp8_piece_as_f16(from[piece], row.inverse);
}

// Like fp8_row_as_f16(), but called by a whole block of at most 1024 threads.
__device__ inline void fp8_row_as_f16_by_block(const uint4* from, int cols, uint4* to, float* scale) {
  constexpr int kHeld = 4;  // pieces that a thread keeps
  __shared__ float most_of_warp[32];
  const int pieces = cols / 8, lane = threadIdx.x % 32, threads = static_cast<int>(blockDim.x);
  uint4 held[kHeld];
  float most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int piece = threadIdx.x + i * threads;
    held[i] = piece < pieces ? from[piece] : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most = most_of_piece(held[i], most);
  for (int piece = threadIdx.x + kHeld * threads; piece < pieces; piece += threads)
    most = most_of_piece(from[piece], most);
  most = most_of_lanes(~0u, most);
  if (lane == 0) most_of_warp[threadIdx.x / 32] = most;
  __syncthreads();
  const Fp8Scale row(most_of_lanes(~0u, lane < threads / 32 ? most_of_warp[lane] : 0));
  if (threadIdx.x == 0) *scale = row.scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int piece = threadIdx.x + i * threads;
    if (piece < pieces) to[piece] = fp8_piece_as_f16(held[i], row.inverse);
  }
  for (int piece = threadIdx.x + kHeld * threads; piece < pieces; piece += threads)
    to[piece] = fp8_piece_as_f16(from[piece], row.inverse);
}

}  // namespace fp4moe
