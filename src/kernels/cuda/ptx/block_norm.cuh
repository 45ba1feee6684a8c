// How a block, or the blocks of a cluster, norm a row: which thread has which elements, and the order of the
// sum of squares. Kernels that norm rows in this way agree in every bit.
//
// A row is vectors of four elements; thread i of n has the vectors i, i + n, i + 2n, ... and adds its squares
// in this order, a warp its threads' sums by halves, then all warps' sums are added in order.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

namespace fp4moe::cuda {

constexpr int kMaxNormThreads = 1024;

// Returns the number of threads of a block that norms a row of `cols` elements: whole warps, one vector per
// thread if possible.
inline unsigned num_norm_threads(int64_t cols) {
  const int64_t threads = std::clamp<int64_t>((cols + 3) / 4, 32, kMaxNormThreads);
  return static_cast<unsigned>((threads + 31) / 32 * 32);
}

__device__ __forceinline__ float sum_of_squares(float sum, const float4& v) {
  sum += v.x * v.x;
  sum += v.y * v.y;
  sum += v.z * v.z;
  return sum + v.w * v.w;
}
__device__ __forceinline__ float4 normed(const float4& v, float inverse, const float4& weight) {
  return {v.x * inverse * weight.x, v.y * inverse * weight.y, v.z * inverse * weight.z,
          v.w * inverse * weight.w};
}

__device__ __forceinline__ float warp_sum(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

// Returns four elements as bf16, in order.
__device__ __forceinline__ uint2 bf16_words(const float4& v) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
  return {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
}

// All threads of the block call it. A barrier must separate two calls.
__device__ __forceinline__ float block_sum(float sum) {
  __shared__ float warps[kMaxNormThreads / 32];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) total += warps[i];
  return total;
}

__device__ __forceinline__ float inverse_rms(float squares, int64_t cols, float eps) {
  return 1 / sqrtf(squares / static_cast<float>(cols) + eps);
}

}  // namespace fp4moe::cuda
