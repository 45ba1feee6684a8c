// PTX of the attention kernels and the gated delta net. Names are those of the PTX manual.
#pragma once

#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_order.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe::cuda {

// ---- numbers ----
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- lanes ----
// Returns the thread's lane, read at each call, so that the compiler cannot compute addresses from it in
// advance. For code that runs in only one pass of a loop: its addresses would occupy registers during the
// whole loop.
__device__ __forceinline__ int lane_read_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
__device__ __forceinline__ int thread_read_here() {  // the same for the thread's index in a block
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- order ----
// Makes the assembler compute x before a later wait instead of moving the wait up: a store that never
// executes (x is never below 0) keeps them in order.
__device__ __forceinline__ void compute_before(float x, uint32_t address) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(x),
               "r"(address)
               : "memory");
}

}  // namespace fp4moe::cuda
