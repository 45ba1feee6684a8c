// A place in the ring of stages through which a block's warps pass data. Device code only.
#pragma once

#include <cstdint>

namespace fp4moe {

// A place in a ring of kCount slots.
template <int kCount>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kCount) slot = 0, parity ^= 1;
  }
};

}  // namespace fp4moe
