// Barriers in shared memory, bulk copies into it, and programmatic dependent launch (PTX ISA 8.x, "mbarrier",
// "cp.async.bulk", "griddepcontrol").
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4moe::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Waits until the kernels that this one depends on are done and what they wrote is visible.
__device__ __forceinline__ void dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel start, as far as it does not depend on this one.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// 16-byte aligned addresses and size; arrives at `barrier` with its bytes.
__device__ __forceinline__ void bulk_copy(void* to_shared, const void* from, uint32_t num_bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to_shared)),
      "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
// Waits for `num_threads` threads of the block at named barrier `id`.
__device__ __forceinline__ void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace fp4moe::ptx
