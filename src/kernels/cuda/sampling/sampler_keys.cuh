// Keys that sort logits as integers, and the mask of ids that are never chosen.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device_sampler.h"

namespace fp4moe {

constexpr float kInfinity = __builtin_huge_valf();

// Returns a key that is larger for larger logits; zeros of either sign have the same key.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Ranked {
  uint32_t key;
  int32_t id;
  __device__ bool is_before(const Ranked& other) const {
    return key != other.key ? key > other.key : id < other.id;
  }
};

__device__ __forceinline__ bool is_masked(const SampleRowsArgs& a, int32_t id) {
  return a.masked != nullptr && (__ldg(a.masked + id / 32) >> (id % 32) & 1) != 0;
}

}  // namespace fp4moe
