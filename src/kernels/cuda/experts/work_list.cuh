// For the work lists of persistent kernels: the search for the expert to which a place in the list belongs.
// Device code only.
#pragma once

#include "kernels/cuda/ptx/ring_place.cuh"

namespace fp4moe {

// Returns the last e in 0 ... num_experts - 1 with start[e] <= index: the expert to which place `index`
// belongs, if start[num_experts] > index. start: [num_experts + 1], ascending.
__device__ __forceinline__ int expert_at(const int* start, int num_experts, int index) {
  int low = 0, high = num_experts;  // start[low] <= index < start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (start[middle] <= index ? low : high) = middle;
  }
  return low;
}

}  // namespace fp4moe
