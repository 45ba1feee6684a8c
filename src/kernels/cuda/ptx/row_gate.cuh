// The gate of a row, sigmoid(x . weight), computed by a block. Kernels that use it agree in every bit. Device
// code only.
#pragma once

#include <cstdint>

namespace fp4moe::cuda {

constexpr int kGateThreads = 256;

// All kGateThreads threads of the block call it. A barrier must separate two calls.
__device__ __forceinline__ float row_gate(const float* x, const float* weight, int64_t cols) {
  __shared__ float warps[kGateThreads / 32];
  float sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < cols; i += kGateThreads) sum += __ldcg(x + i) * __ldg(weight + i);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (float part : warps) total += part;
  return 1 / (1 + expf(-total));
}

}  // namespace fp4moe::cuda
