// The protocol of kernels that exchange data between the GPUs of a group (kernels/device_comm.h). Device code
// only.
//
// There are two ways to signal that data has arrived:
//   marked words   4-byte words, for instance f32 or two bf16, that are kUnsent until they arrive. Each word
//                  shows its own arrival, so the sender needs neither flag nor fence. The reader marks a word
//                  as unsent again once it has read the word.
//   flags          plain stores, a block barrier, then one release store of the epoch for each (block, peer);
//                  readers poll with acquire loads.
//
// Both use two buffers, selected by the parity of the epoch. A buffer is not overwritten too early: a rank
// that finishes operation n has received data from every peer in n, and each peer had finished n - 1 before.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/device_comm.h"

namespace fp4moe::cuda {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_words(void* to, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_words(void* to, const uint2& v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_words(void* to, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ uint4 load_words(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_words(const uint2* from) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ CommState* state_of(const CommGroup& group, int rank) {
  return reinterpret_cast<CommState*>(group.regions[rank]);
}

// Loads both with one instruction.
__device__ __forceinline__ void load_epoch(const CommState* state, uint32_t& epoch, uint32_t& poison) {
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(epoch), "=r"(poison) : "l"(state));
}

// Returns an address in a rank's exchange memory (kernels/device_a2a.h).
template <class T>
__device__ __forceinline__ T* exchange_memory(const CommGroup& group, int rank, int64_t offset) {
  return reinterpret_cast<T*>(group.regions[rank] + group.layout.exchange + offset);
}

// Selects the constructor for a kernel that waits for the peers' stores in an operation that an earlier
// kernel of this rank has entered.
struct Entered {};

// One operation, as seen by one block.
struct Operation {
  const CommGroup& group;
  const CommOp& op;
  uint32_t epoch;         // the value with which the operation ends
  bool failed;            // the group had failed before the operation
  uint32_t ticket = ~0u;  // thread 0: how many blocks had entered before this one

  __device__ __forceinline__ Operation(const CommGroup& g, const CommOp& o, Entered) : group(g), op(o) {
    uint32_t poison;
    load_epoch(state_of(g, g.rank), epoch, poison);
    failed = poison != 0;
  }
  // Enters the operation. All threads of all blocks call it once, after they have waited for preceding
  // kernels.
  __device__ __forceinline__ Operation(const CommGroup& g, const CommOp& o) : Operation(g, o, Entered{}) {
    CommState* const state = state_of(g, g.rank);
    ++epoch;
    __syncthreads();  // all threads of the block have read the epoch
    if (threadIdx.x == 0) ticket = atomicAdd(&state->num_entered, 1u);
  }
  // The last block to enter ends the operation, because every block has read the epoch. It looks at its
  // ticket only here, so that no block waits for the atomic operation.
  __device__ __forceinline__ ~Operation() {
    if (threadIdx.x != 0 || !entered_last()) return;
    CommState* const state = state_of(group, group.rank);
    state->num_entered = 0;
    *reinterpret_cast<volatile uint32_t*>(&state->epoch) = epoch;
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  __device__ __forceinline__ uint32_t parity() const { return epoch & 1; }
  // Thread 0: whether this block was the last to enter. All blocks of its grid have then started, so it can
  // wait for the peers without keeping one of them from starting.
  __device__ __forceinline__ bool entered_last() const { return ticket == gridDim.x * gridDim.y - 1; }

  // Polls `arrived` until it returns true, the deadline passes or the group fails. `seen` is for the verdict.
  template <class Arrived>
  __device__ __forceinline__ void wait(int peer, const Arrived& arrived) const {
    uint32_t seen = 0;
    if (arrived(seen)) return;
    const uint64_t end = nanoseconds() + group.deadline_ns;
    const volatile uint32_t* const poison = &state_of(group, group.rank)->poison;
    for (uint32_t polls = 1; !arrived(seen); ++polls) {
      if (polls % 256 != 0) continue;
      if (*poison != 0) return;
      if (nanoseconds() >= end) return fail(group, op, epoch, peer, seen);
    }
  }

  // Makes all ranks of the group fail. The rank's first failure becomes its verdict. Static, so that an
  // operation can be in registers.
  static __device__ __noinline__ void fail(const CommGroup& group, const CommOp& op, uint32_t epoch, int peer,
                                           uint32_t seen) {
    if (atomicAdd(&state_of(group, group.rank)->num_failed, 1u) == 0) {
      CommVerdict* const v = group.verdict;
      v->peer = static_cast<uint32_t>(peer);
      v->op = reinterpret_cast<uint64_t>(op.name);
      v->layer = op.layer;
      v->expected = epoch;
      v->seen = seen;
      v->block = blockIdx.x;
      v->time = nanoseconds();
      store_release(&v->is_set, 1);
    }
    for (int r = 0; r < group.size; ++r)
      *reinterpret_cast<volatile uint32_t*>(&state_of(group, r)->poison) = 1;
  }
};

__device__ __forceinline__ uint32_t sendable(uint32_t word) { return word == kUnsent ? 0x7fffffffu : word; }
__device__ __forceinline__ uint2 sendable(const uint2& v) { return {sendable(v.x), sendable(v.y)}; }
__device__ __forceinline__ uint4 sendable(const uint4& v) {
  return {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)};
}

__device__ __forceinline__ bool has_arrived(const uint2& v) { return v.x != kUnsent && v.y != kUnsent; }
__device__ __forceinline__ bool has_arrived(const uint4& v) {
  return v.x != kUnsent && v.y != kUnsent && v.z != kUnsent && v.w != kUnsent;
}
__device__ __forceinline__ void mark_unsent(uint2* at) { *at = make_uint2(kUnsent, kUnsent); }
__device__ __forceinline__ void mark_unsent(uint4* at) {
  *at = make_uint4(kUnsent, kUnsent, kUnsent, kUnsent);
}

// Returns the address of words[parity][source] of `rank`.
template <class Words>
__device__ __forceinline__ Words* words_at(const CommGroup& group, uint32_t parity, int rank, int source) {
  return reinterpret_cast<Words*>(group.regions[rank] + group.layout.words +
                                  (int64_t{parity} * group.size + source) * group.layout.word_bytes);
}
template <class Words>
__device__ __forceinline__ Words* words_at(const Operation& o, int rank, int source) {
  return words_at<Words>(o.group, o.parity(), rank, source);
}

// Waits for the words at `from`, uint2 or uint4, which `peer` stores, and marks them as unsent again.
template <class Words>
__device__ __forceinline__ Words take_words(const Operation& operation, int peer, Words* from) {
  Words v;
  operation.wait(peer, [&](uint32_t&) {
    v = load_words(from);
    return has_arrived(v);
  });
  mark_unsent(from);
  return v;
}

// The same if `words` have been loaded from there before, perhaps before they arrived.
template <class Words>
__device__ __forceinline__ void finish_taking(const Operation& operation, int peer, Words* from,
                                              Words& words) {
  if (!has_arrived(words))
    words = take_words(operation, peer, from);
  else
    mark_unsent(from);
}

// For words that are there already when an operation begins, as those that PartialSenders have sent: a thread
// loads its first words from its first peer together with the epoch, instead of after it, from the buffer
// that the epoch will select unless the kernel has started before the previous operation has ended.
struct EarlyWords {
  const CommGroup& group;
  uint32_t parity = 0;

  // Before the grid dependency wait.
  __device__ __forceinline__ explicit EarlyWords(const CommGroup& g) : group(g) {
    uint32_t epoch, poison;
    load_epoch(state_of(g, g.rank), epoch, poison);
    parity = (epoch + 1) % 2;
  }
  // After the wait.
  template <class Words>
  __device__ __forceinline__ Words load(int64_t index) const {
    Words words;
    mark_unsent(&words);
    if (group.size == 1) return words;
    return load_words(words_at<Words>(group, parity, group.rank, group.rank == 0 ? 1 : 0) + index);
  }
  // Marks words as unsent that belong to another operation.
  template <class Words>
  __device__ __forceinline__ void check(const Operation& o, Words& words) const {
    if (o.parity() != parity) mark_unsent(&words);
  }
};

__device__ __forceinline__ const uint32_t* flags_of(const CommGroup& g, int peer) {
  return reinterpret_cast<const uint32_t*>(g.regions[g.rank] + g.layout.flags) + peer * kMaxCommBlocks;
}

// Sets flag `index` at a peer, to signal that all earlier stores of the block's threads have been performed.
// Call it after a block barrier.
__device__ __forceinline__ void raise_flag(const Operation& operation, int peer, int64_t index) {
  const CommGroup& g = operation.group;
  auto* const flags = reinterpret_cast<uint32_t*>(g.regions[peer] + g.layout.flags);
  store_release(flags + g.rank * kMaxCommBlocks + index, operation.epoch);
}
// The same at every peer.
__device__ __forceinline__ void raise_flags(const Operation& operation, int64_t index) {
  const CommGroup& g = operation.group;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < g.size && peer != g.rank) raise_flag(operation, peer, index);
}

// Sets flags first ... first + count - 1 at every peer. The same, but by several warps: a thread that raises
// two flags would wait for the first before the second.
__device__ __forceinline__ void raise_flags(const Operation& operation, int64_t first, int count) {
  const CommGroup& g = operation.group;
  const int peer = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
  if (peer >= g.size || peer == g.rank) return;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < count; i += warps)
    raise_flag(operation, peer, first + i);
}

// Waits for flag `index` of a peer.
__device__ __forceinline__ void wait_for_flag_of(const Operation& operation, int peer, int64_t index) {
  operation.wait(peer, [&](uint32_t& seen) {
    seen = load_acquire(flags_of(operation.group, peer) + index);
    return static_cast<int32_t>(seen - operation.epoch) >= 0;
  });
}

// Sets flag `index` at every peer and waits for that of every peer. Different warps do so, because each takes
// as long as a trip through the L2. Called by at least two warps; ends with a block barrier.
__device__ __forceinline__ void meet_peers(const Operation& operation, int64_t index) {
  const CommGroup& g = operation.group;
  const int warp = static_cast<int>(threadIdx.x) / 32, peer = static_cast<int>(threadIdx.x) % 32;
  if (peer < g.size && peer != g.rank) {
    if (warp == 0) raise_flag(operation, peer, index);
    if (warp == 1) wait_for_flag_of(operation, peer, index);
  }
  __syncthreads();
}

// Waits for the first `num_flags` flags of each peer. Ends with a block barrier.
__device__ __forceinline__ void wait_for_flags(const Operation& operation, int num_flags) {
  const CommGroup& g = operation.group;
  for (int peer = 0; peer < g.size; ++peer) {
    if (peer == g.rank) continue;
    for (int i = static_cast<int>(threadIdx.x); i < num_flags; i += static_cast<int>(blockDim.x))
      wait_for_flag_of(operation, peer, i);
  }
  __syncthreads();
}

// Waits for flag `index` of each peer. Ends with a block barrier.
__device__ __forceinline__ void wait_for_flag(const Operation& operation, int64_t index) {
  const CommGroup& g = operation.group;
  if (const int peer = static_cast<int>(threadIdx.x); peer < g.size && peer != g.rank)
    wait_for_flag_of(operation, peer, index);
  __syncthreads();
}

}  // namespace fp4moe::cuda
