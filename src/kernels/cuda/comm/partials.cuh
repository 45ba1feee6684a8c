// The operands of a sum as they are sent: 16-byte vectors of four f32 or eight bf16. Device code only.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/comm/group.cuh"

namespace fp4moe::cuda {

// The elements of one vector.
template <bool kBf16>
struct Elements {
  static constexpr int kCount = kBf16 ? 8 : 4;
  float values[kCount] = {};

  static __device__ __forceinline__ Elements load(const float* from) {
    Elements e;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(from + i));
      e.values[i] = v.x, e.values[i + 1] = v.y, e.values[i + 2] = v.z, e.values[i + 3] = v.w;
    }
    return e;
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      *reinterpret_cast<float4*>(to + i) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  }
  __device__ __forceinline__ void operator+=(const Elements& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += other.values[i];
  }

  // Returns the vector that is sent for these elements, rounded if they are sent as bf16.
  __device__ __forceinline__ uint4 pack() const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBf16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = reinterpret_cast<const uint32_t&>(pair);
      } else {
        words[i] = __float_as_uint(values[i]);
      }
    }
    return sendable({words[0], words[1], words[2], words[3]});
  }
  static __device__ __forceinline__ Elements unpack(const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    Elements e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBf16) {
        e.values[2 * i] = __uint_as_float(words[i] << 16);
        e.values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        e.values[i] = __uint_as_float(words[i]);
      }
    }
    return e;
  }
};

}  // namespace fp4moe::cuda
