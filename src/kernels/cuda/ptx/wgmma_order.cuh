// The parts that every wgmma needs (PTX ISA 9.7.15): fences, groups, waits, and descriptors of operands in
// shared memory. Device code only.
#pragma once

#include <cstdint>

namespace fp4moe {

// Makes registers written before it visible to the matrix instructions after it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of this warp's groups are pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of d across asynchronous work.
template <int kCount>
__device__ __forceinline__ void keep_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Returns the descriptor of an operand in shared memory: rows of 128 bytes (64 bf16 or 128 e4m3 along K),
// with swizzled 16-byte pieces (piece j of row r is at j ^ (r % 8)); the tile starts at a multiple of 1024
// bytes. To advance 32 bytes along K, add 2. block_bytes: distance between blocks of such rows if rows are
// the contraction; ignored otherwise.
__device__ __forceinline__ uint64_t wgmma_b_descriptor(uint32_t shared_address, uint32_t block_bytes = 16) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kStride = 64ull << 32;
  return kSwizzle128 | kStride | static_cast<uint64_t>(block_bytes >> 4) << 16 |
         ((shared_address & 0x3ffff) >> 4);
}

// Returns the descriptor advanced by `bytes`, which must not carry out of the address. Cheaper than a 64-bit
// addition.
__device__ __forceinline__ uint64_t wgmma_b_advance(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + bytes / 16;
  return (descriptor & 0xffffffff00000000ull) | low;
}

}  // namespace fp4moe
