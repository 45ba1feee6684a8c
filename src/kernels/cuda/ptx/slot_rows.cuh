// The rows of a token's experts and their weights, for the kernels that add them (MoeCombineArgs). Device
// code only.
#pragma once

#include <cstdint>

namespace fp4moe::cuda {

struct SlotRows {
  const int32_t* row_of_slot;  // [T, topk]; negative: no row
  const float* weights;        // [T, topk], or null: 1
  int topk;

  // Calls add(weight, y) for a token's slots in top-k order, where y = load(row), or zeros, with weight 0,
  // without a row. The loads of several slots are under way at once.
  template <class Load, class Add>
  __device__ __forceinline__ void for_slots(int64_t token, const Load& load, const Add& add) const {
    constexpr int kAtOnce = 4;
    const int64_t slots = token * topk;
    for (int first = 0; first < topk; first += kAtOnce) {
      int32_t rows[kAtOnce];
      float factors[kAtOnce];
      decltype(load(0)) loaded[kAtOnce]{};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        rows[j] = first + j < topk ? __ldcg(row_of_slot + slots + first + j) : -1;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        factors[j] = weights == nullptr || first + j >= topk ? 1 : __ldcg(weights + slots + first + j);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (rows[j] >= 0) loaded[j] = load(rows[j]);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + j < topk) add(rows[j] < 0 ? 0 : factors[j], loaded[j]);
    }
  }
};

}  // namespace fp4moe::cuda
