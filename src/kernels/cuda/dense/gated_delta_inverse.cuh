// The inverse of I + A of a chunk, A strictly lower triangular, in a square of floats in shared memory.
// Device code only.
//
// The square has A below the diagonal. At and above it the inverse is written, transposed: a column of it is
// contiguous. Two warps invert the halves of 32 rows by substitution. Then they join them,
//   (I + A)^-1 = [T1, 0; -T2 A21 T1, T2]
// with tensor cores, in tf32 pairs high + low, about 2^-20: substitution over all 64 rows would take one of
// the warps five times as long as over 32.
#pragma once

#include "kernels/cuda/dense/gated_delta_convolve.cuh"

namespace fp4moe::cuda {

constexpr int kHalf = kDeltaChunk / 2;          // rows of A that a warp inverts
constexpr int kBlock = 8;                       // rows of A whose part of the inverse is in registers
constexpr int kSquareStride = kDeltaChunk + 4;  // floats of a row of the square

// x = (I + a)^-1 x for kBlock rows of A, on the diagonal at `a`.
__device__ __forceinline__ void solve_block(const float* a, float (&x)[kBlock]) {
#pragma unroll
  for (int k = 0; k < kBlock; k += 4)
#pragma unroll
    for (int i = k + 1; i < kBlock; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(a + i * kSquareStride + k);
      const float of_a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (k + j < i) x[i] = fmaf(-of_a[j], x[k + j], x[i]);
    }
}

// Inverts the half of I + A with the rows and columns from `first` on, by substitution. A lane has one
// column, which becomes a row of the square at and right of the diagonal.
__device__ __forceinline__ void invert_half(float* square, int first) {
  const int column = first + lane_index();
  float* const own = square + column * kSquareStride;
#pragma unroll 1
  for (int row = first; row < first + kHalf; row += kBlock) {
    const float* const a = square + row * kSquareStride;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = row + i == column ? 1 : 0;
#pragma unroll 2
    for (int k = first; k < row; k += 4) {
      const float4 v = *reinterpret_cast<const float4*>(own + k);
      const float y[4] = {k >= column ? v.x : 0, k + 1 >= column ? v.y : 0, k + 2 >= column ? v.z : 0,
                          k + 3 >= column ? v.w : 0};
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const float4 of_a = *reinterpret_cast<const float4*>(a + i * kSquareStride + k);
        x[i] = fmaf(-of_a.x, y[0], x[i]);
        x[i] = fmaf(-of_a.y, y[1], x[i]);
        x[i] = fmaf(-of_a.z, y[2], x[i]);
        x[i] = fmaf(-of_a.w, y[3], x[i]);
      }
    }
    solve_block(a + row, x);
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) {
      if (row + i >= column) {
        *reinterpret_cast<float4*>(own + row + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
      } else {
#pragma unroll
        for (int j = 1; j < 4; ++j)
          if (row + i + j >= column) own[row + i + j] = x[i + j];
      }
    }
  }
}

// x = high + low, nearly; mma_tf32 ignores the bits after the first 10 of a fraction.
struct SplitTf32 {
  uint32_t high, low;
};
__device__ __forceinline__ SplitTf32 split_tf32(float x) {
  const uint32_t high = __float_as_uint(x) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

// c += a b as mma_tf32, but nearly as in f32.
__device__ __forceinline__ void add_product(float (&c)[4], const float (&a)[4], float b0, float b1) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const SplitTf32 split = split_tf32(a[i]);
    high[i] = split.high, low[i] = split.low;
  }
  const SplitTf32 first = split_tf32(b0), second = split_tf32(b1);
  ptx::mma_tf32(c, low, first.high, second.high);
  ptx::mma_tf32(c, high, first.low, second.low);
  ptx::mma_tf32(c, high, first.high, second.high);
}

// The lower left quarter of the inverse, -T2 A21 T1 with the inverses T1 and T2 of the halves; transposed to
// the upper right of the square. A warp computes columns first ... first + 15 of it, as T1^T A21^T and then
// times T2^T: the accumulators of the first product are fragments of the second, if its k = t and t + 4 stand
// for 2 t and 2 t + 1.
__device__ __forceinline__ void join_halves(float* square, int first) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  const float* const of_a = square + kHalf * kSquareStride;
  float w[kHalf / 8][4] = {};
#pragma unroll
  for (int k = 0; k < kHalf; k += 8) {
    if (k < first) continue;  // T1 is lower triangular
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + g + i % 2 * 8, column = k + t + i / 2 * 4;
      a[i] = column >= row ? square[row * kSquareStride + column] : 0;
    }
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
      const float* const b = of_a + (n * 8 + g) * kSquareStride + k + t;
      add_product(w[n], a, b[0], b[4]);
    }
  }
  float out[kHalf / 8][4] = {};
#pragma unroll
  for (int k = 0; k < kHalf / 8; ++k) {
    const float a[4] = {-w[k][0], -w[k][2], -w[k][1], -w[k][3]};
#pragma unroll
    for (int n = k; n < kHalf / 8; ++n) {
      const int row = k * 8 + 2 * t, column = n * 8 + g;
      const float* const b = of_a + row * kSquareStride + kHalf + column;
      add_product(out[n], a, column >= row ? b[0] : 0, column > row ? b[kSquareStride] : 0);
    }
  }
#pragma unroll
  for (int n = 0; n < kHalf / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(square + (first + half * 8 + g) * kSquareStride + kHalf + n * 8 + 2 * t) = {
          out[n][half * 2], out[n][half * 2 + 1]};
}

}  // namespace fp4moe::cuda
