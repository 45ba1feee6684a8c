// E4M3 codes of pages on their way to wgmma's bf16 operands in shared memory. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx/ptx_e4m3.cuh"

namespace fp4moe::cuda {

// Loads eight codes, 8-byte aligned.
__device__ __forceinline__ uint2 load_codes(const uint8_t* codes) {
  return __ldcg(reinterpret_cast<const uint2*>(codes));
}

// Converts eight codes; exact.
__device__ __forceinline__ uint4 bf16_of_codes(const uint2& codes) {
  uint4 pairs;
  ptx::widen(codes.x, pairs.x, pairs.y);
  ptx::widen(codes.y, pairs.z, pairs.w);
  return {ptx::bf16_of_f16_pair(pairs.x), ptx::bf16_of_f16_pair(pairs.y), ptx::bf16_of_f16_pair(pairs.z),
          ptx::bf16_of_f16_pair(pairs.w)};
}

}  // namespace fp4moe::cuda
