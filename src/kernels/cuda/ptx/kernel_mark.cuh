// How a kernel records that the device has reached it (Stream::mark). Device code only.
#pragma once

#include "device/stream.h"

namespace fp4moe {

// Call it after ptx::grid_dependency_wait(). Only the grid's first thread stores; other threads may call it
// too.
__device__ __forceinline__ void note_reached(const KernelMark& mark) {
  if ((threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) != 0) return;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(mark.reached), "l"(mark.kernel) : "memory");
}

}  // namespace fp4moe
