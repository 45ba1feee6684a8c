// Sorts the slots of a batch into rows by expert: a stable counting sort, on any GPU.
//
// Computes  offsets (packed), counts, slot_of_row and row_of_slot of DeviceRows from ids [T, topk]: an
//           expert's rows are in ascending slot order; slots without a local expert get row -1.
// Bytes     ids read two or three times, 8 bytes written per slot.
// Bound     latency: one block for up to kOneBlockSlots slots, otherwise two kernels of up to kSortBlocks
//           blocks.
// Numerics  integers; the order is fixed by construction and does not depend on races.
//
// w4a8's tokens are quantised by other blocks of the same launch (fp8_tokens.cuh): for a layer with 16
// tokens, a separate launch would take longer than the quantisation itself.
#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/experts/fp8_tokens.cuh"
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/ptx/kernel_mark.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe {
namespace {

constexpr int kOneBlockSlots = 4096, kMaxThreads = 1024;

struct SortPlan {
  MoeSortArgs a;
  TokenQuantArgs tokens;  // blocks num_blocks and up quantise one token each
  int num_slots = 0, num_blocks = 1, slots_per_block = 0, slots_per_warp = 0, threads = 0;
  KernelMark mark;
};

SortPlan plan_sort(const MoeSortArgs& a) {
  SortPlan plan;
  plan.a = a;
  plan.num_slots = static_cast<int>(a.num_tokens * a.topk);
  if (plan.num_slots > kOneBlockSlots && a.scratch != nullptr)
    plan.num_blocks = std::min(kSortBlocks, (plan.num_slots + kMaxThreads - 1) / kMaxThreads);
  plan.slots_per_block = (plan.num_slots + plan.num_blocks - 1) / plan.num_blocks;
  plan.slots_per_block = std::max(32, (plan.slots_per_block + 31) / 32 * 32);
  plan.threads = std::min((plan.slots_per_block + 255) / 256 * 256, kMaxThreads);
  const int warps = plan.threads / 32;
  plan.slots_per_warp = (plan.slots_per_block + 32 * warps - 1) / (32 * warps) * 32;
  return plan;
}

__device__ __forceinline__ int local_expert(const MoeSortArgs& a, int slot, int end) {
  if (slot >= end) return -1;
  const int64_t e = a.ids == nullptr ? 0 : a.ids[slot] - a.first_expert;
  return e >= 0 && e < a.num_experts ? static_cast<int>(e) : -1;
}

// Sets scratch[block][e] to the number of slots of expert e in the block's range.
__global__ void count_slots_kernel(const __grid_constant__ SortPlan plan) {
  extern __shared__ int counts[];
  const MoeSortArgs& a = plan.a;
  ptx::grid_dependency_wait();
  note_reached(plan.mark);
  ptx::grid_dependents_launch();
  const int num_experts = static_cast<int>(a.num_experts);
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  const int first = blockIdx.x * plan.slots_per_block,
            end = min(plan.num_slots, first + plan.slots_per_block);
  for (int slot = first + threadIdx.x; slot < end; slot += blockDim.x) {
    const int e = local_expert(a, slot, end);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x)
    a.scratch[blockIdx.x * num_experts + e] = counts[e];
}

// Replaces v[0 ... n) with its exclusive prefix sums and sets v[n] to the total. Called by all threads; scan:
// one int per warp.
__device__ void scan_in_block(int* v, int n, int* scan) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (n + blockDim.x - 1) / blockDim.x;
  const int first = min(n, static_cast<int>(threadIdx.x) * each), last = min(n, first + each);
  int sum = 0;
  for (int i = first; i < last; ++i) sum += v[i];
  int upto = sum;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, upto, d);
    if (lane >= d) upto += other;
  }
  if (lane == 31) scan[warp] = upto;
  __syncthreads();
  int before = upto - sum + __reduce_add_sync(~0u, lane < warp ? scan[lane] : 0);
  for (int i = first; i < last; ++i) {
    const int value = v[i];
    v[i] = before;
    before += value;
  }
  if (threadIdx.x == blockDim.x - 1) v[n] = before;
  __syncthreads();
}

// A lane's slot among 32 slots, and the lanes whose slots have the same expert.
struct SlotExpert {
  int expert = -1;
  unsigned same = 0;

  __device__ __forceinline__ SlotExpert(const MoeSortArgs& a, int slot, int end)
      : expert(local_expert(a, slot, end)), same(__match_any_sync(~0u, expert)) {}
  __device__ __forceinline__ unsigned below() const { return same & ((1u << threadIdx.x % 32) - 1); }
  // Adds the slots to the warp's counts [L]. Called by all lanes.
  __device__ __forceinline__ void count(int* counts) const {
    __syncwarp();
    if (expert >= 0 && below() == 0) counts[expert] += __popc(same);
    __syncwarp();
  }
};

// Shared memory of a block, in order.
struct SortMemory {
  int* starts;  // [L + 1]: an expert's rows in all blocks, then its first row
  int* before;  // [L]: an expert's rows in the blocks before this one
  int* hist;    // [warps][L]: an expert's rows in a warp, then the index among them of the warp's first slot
  static size_t bytes(size_t num_experts, size_t warps) {
    return ((warps + 2) * num_experts + 1) * sizeof(int);
  }
};

// Adds up the blocks' counts. Called by all threads.
__device__ __forceinline__ void add_blocks(const SortPlan& plan, const SortMemory& memory) {
  if (plan.num_blocks == 1) return;
  const int n = static_cast<int>(plan.a.num_experts);
  for (int i = threadIdx.x; i < plan.num_blocks * n; i += blockDim.x) {
    const int count = plan.a.scratch[i], e = i % n;
    if (count == 0) continue;
    atomicAdd(memory.starts + e, count);
    if (i < static_cast<int>(blockIdx.x) * n) atomicAdd(memory.before + e, count);
  }
}

// Sets hist and starts to their second meanings. Block 0 also writes counts, offsets and progress.
__device__ __forceinline__ void place_counts(const SortPlan& plan, const SortMemory& memory, int* scan) {
  constexpr int kAtOnce = 8;  // warps; their number is a multiple of it
  const MoeSortArgs& a = plan.a;
  const int n = static_cast<int>(a.num_experts), warps = blockDim.x / 32;
  for (int e = threadIdx.x; e < n; e += blockDim.x) {
    int before = memory.before[e];
    for (int first = 0; first < warps; first += kAtOnce) {
      int counts[kAtOnce];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) counts[w] = memory.hist[(first + w) * n + e];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        memory.hist[(first + w) * n + e] = before;
        before += counts[w];
      }
    }
    const int total = plan.num_blocks > 1 ? memory.starts[e] : before;
    memory.starts[e] = a.rows.capacity > 0 ? e * static_cast<int>(a.rows.capacity) : total;
    if (blockIdx.x == 0) a.rows.counts[e] = total;
  }
  __syncthreads();
  if (a.rows.capacity == 0) scan_in_block(memory.starts, n, scan);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= n; e += blockDim.x) {
      if (a.rows.capacity == 0)
        a.rows.offsets[e] = e == n && a.has_shared ? plan.num_slots : memory.starts[e];
      if (a.rows.progress != nullptr) a.rows.progress[e] = 0;
    }
  }
}

// Places the rows of the shared expert.
__device__ __forceinline__ void place_shared(const SortPlan& plan) {
  const MoeSortArgs& a = plan.a;
  const int tokens = static_cast<int>(a.num_tokens), topk = static_cast<int>(a.topk);
  for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < tokens; t += plan.num_blocks * blockDim.x)
    a.rows.slot_of_row[plan.num_slots + t] = t * topk;
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  a.rows.counts[a.num_experts] = tokens;
  if (a.rows.progress != nullptr) a.rows.progress[a.num_experts + 1] = 0;
}

// Writes the rows of the slots that begin at `slot - lane`; hist, starts: the warp's.
__device__ __forceinline__ void place(const MoeSortArgs& a, const SlotExpert& of, int slot, int end,
                                      const int* hist, const int* starts) {
  int row = -1;
  if (of.expert >= 0) {
    const int within = hist[of.expert] + __popc(of.below());
    if (a.rows.capacity == 0 || within < a.rows.capacity) {
      row = starts[of.expert] + within;
      a.rows.slot_of_row[row] = slot;
    }
  }
  if (slot < end) a.rows.row_of_slot[slot] = row;
}

#if __CUDA_ARCH__ >= 890
__device__ __noinline__ void quantize_token(const TokenQuantArgs& tokens, int token) {
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int64_t at = token * tokens.hidden_size;
  fp8_row_as_f16_by_block(reinterpret_cast<const uint4*>(tokens.x + at), static_cast<int>(tokens.hidden_size),
                          reinterpret_cast<uint4*>(tokens.values + at), tokens.scales + token);
}
#endif

__global__ void __launch_bounds__(kMaxThreads) place_slots_kernel(const __grid_constant__ SortPlan plan) {
  extern __shared__ int words[];
  __shared__ int scan[32];
#if __CUDA_ARCH__ >= 890
  if (static_cast<int>(blockIdx.x) >= plan.num_blocks)
    return quantize_token(plan.tokens, blockIdx.x - plan.num_blocks);
#endif
  const MoeSortArgs& a = plan.a;
  const int n = static_cast<int>(a.num_experts), warps = blockDim.x / 32;
  const SortMemory memory = {words, words + n + 1, words + 2 * n + 1};
  for (int i = threadIdx.x; i < (warps + 2) * n + 1; i += blockDim.x) words[i] = 0;
  ptx::grid_dependency_wait();
  note_reached(plan.mark);
  ptx::grid_dependents_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block_first = blockIdx.x * plan.slots_per_block;
  const int end = min(plan.num_slots, block_first + plan.slots_per_block);
  const int first = block_first + warp * plan.slots_per_warp, last = first + plan.slots_per_warp;
  int* hist = memory.hist + warp * n;
  const SlotExpert ahead(a, first + lane, end);  // a warp rarely has more slots
  __syncthreads();
  if (a.has_shared) place_shared(plan);
  ahead.count(hist);
  for (int slot = first + 32 + lane; slot < last; slot += 32) SlotExpert(a, slot, end).count(hist);
  add_blocks(plan, memory);
  __syncthreads();
  place_counts(plan, memory, scan);
  place(a, ahead, first + lane, end, hist, memory.starts);
  if (plan.slots_per_warp > 32) ahead.count(hist);
  for (int slot = first + 32 + lane; slot < last; slot += 32) {
    const SlotExpert of(a, slot, end);
    place(a, of, slot, end, hist, memory.starts);
    of.count(hist);
  }
}

}  // namespace

void moe_sort(const MoeSortArgs& a) { moe_sort_and_quantize(a, {}); }

void moe_sort_and_quantize(const MoeSortArgs& a, const TokenQuantArgs& tokens) {
  FP4MOE_CHECK(!a.has_shared || a.rows.capacity == 0, "a shared expert among masked rows");
  SortPlan plan = plan_sort(a);
  plan.tokens = tokens;
  const auto n = static_cast<size_t>(a.num_experts);
  const auto blocks = static_cast<unsigned>(plan.num_blocks), threads = static_cast<unsigned>(plan.threads);
  if (blocks > 1) launch("moe_sort_count", count_slots_kernel, {blocks, kMaxThreads, n * sizeof(int)}, plan);
  const size_t bytes = SortMemory::bytes(n, static_cast<size_t>(plan.threads / 32));
  prepare_kernel(place_slots_kernel, {.shared_bytes = device_limits().shared_bytes_per_block});
  const auto token_blocks = static_cast<unsigned>(tokens.num_tokens);
  launch("moe_sort", place_slots_kernel, {blocks + token_blocks, threads, bytes}, plan);
}

}  // namespace fp4moe
