// The rows of a token's experts and their weights, for the kernels that add them (MoeCombineArgs). Device
// code only.
#pragma once

#include <cstdint>

namespace fp4moe::cuda {

struct SlotRows {
  const int32_t* row_of_slot;  // [T, topk]; negative: no row
  const float* weights;        // [T, topk], or null: 1
  int topk;

  struct Slot {
    int64_t row;
    float weight;  // 0 without a row
  };
  __device__ __forceinline__ Slot slot(int64_t token, int k) const {
    const int64_t at = token * topk + k, row = __ldcg(row_of_slot + at);
    return {row, row < 0 ? 0 : weights == nullptr ? 1 : __ldcg(weights + at)};
  }
};

}  // namespace fp4moe::cuda
