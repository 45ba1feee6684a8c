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
  plan.threads = std::clamp(plan.slots_per_block, 256, kMaxThreads);
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
__global__ void count_slots_kernel(const SortPlan plan) {
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
  int before = upto - sum;
  for (int w = 0; w < warp; ++w) before += scan[w];
  for (int i = first; i < last; ++i) {
    const int value = v[i];
    v[i] = before;
    before += value;
  }
  if (threadIdx.x == blockDim.x - 1) v[n] = before;
  __syncthreads();
}

// Counts each warp's slots by expert: hist[warp][e].
__device__ void count_by_warp(const MoeSortArgs& a, const SortPlan& plan, int first, int end, int* hist) {
  const int lane = threadIdx.x % 32;
  for (int base = first; base < first + plan.slots_per_warp; base += 32) {
    const int e = local_expert(a, base + lane, end);
    const unsigned same = __match_any_sync(~0u, e);
    if (e >= 0 && lane == __ffs(same) - 1) hist[e] += __popc(same);
    __syncwarp();
  }
}

// Sets hist[warp][e] to the index, among expert e's rows, of the warp's first slot, and starts[e] to the
// expert's first row. Block 0 also writes counts, offsets and progress.
__device__ void place_counts(const MoeSortArgs& a, const SortPlan& plan, int* hist, int* starts, int* scan) {
  const int n = static_cast<int>(a.num_experts), warps = blockDim.x / 32;
  for (int e = threadIdx.x; e < n; e += blockDim.x) {
    int total = 0, before = 0;
    if (plan.num_blocks > 1) {
      for (int b = 0; b < plan.num_blocks; ++b) {
        const int count = a.scratch[b * n + e];
        total += count;
        if (b < blockIdx.x) before += count;
      }
    }
    for (int w = 0; w < warps; ++w) {
      const int count = hist[w * n + e];
      hist[w * n + e] = before;
      before += count;
    }
    starts[e] = plan.num_blocks > 1 ? total : before;
  }
  __syncthreads();
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e < n; e += blockDim.x) a.rows.counts[e] = starts[e];
  __syncthreads();
  if (a.rows.capacity > 0) {
    for (int e = threadIdx.x; e < n; e += blockDim.x) starts[e] = e * static_cast<int>(a.rows.capacity);
    __syncthreads();
  } else {
    scan_in_block(starts, n, scan);
  }
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= n; e += blockDim.x) {
      if (a.rows.capacity == 0) a.rows.offsets[e] = starts[e];
      if (a.rows.progress != nullptr) a.rows.progress[e] = 0;
    }
  }
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

__global__ void __launch_bounds__(kMaxThreads) place_slots_kernel(const SortPlan plan) {
  extern __shared__ int memory[];
  __shared__ int scan[32];
#if __CUDA_ARCH__ >= 890
  if (static_cast<int>(blockIdx.x) >= plan.num_blocks)
    return quantize_token(plan.tokens, blockIdx.x - plan.num_blocks);
#endif
  const MoeSortArgs& a = plan.a;
  const int n = static_cast<int>(a.num_experts), warps = blockDim.x / 32;
  int* starts = memory;  // [L + 1]
  int* hist = memory + n + 1;
  for (int i = threadIdx.x; i < warps * n; i += blockDim.x) hist[i] = 0;
  ptx::grid_dependency_wait();
  note_reached(plan.mark);
  ptx::grid_dependents_launch();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block_first = blockIdx.x * plan.slots_per_block;
  const int end = min(plan.num_slots, block_first + plan.slots_per_block);
  const int first = block_first + warp * plan.slots_per_warp;
  count_by_warp(a, plan, first, end, hist + warp * n);
  __syncthreads();
  place_counts(a, plan, hist, starts, scan);
  for (int base = first; base < first + plan.slots_per_warp; base += 32) {
    const int slot = base + lane, e = local_expert(a, slot, end);
    const unsigned same = __match_any_sync(~0u, e), below = same & ((1u << lane) - 1);
    int row = -1;
    if (e >= 0) {
      const int within = hist[warp * n + e] + __popc(below);
      if (a.rows.capacity == 0 || within < a.rows.capacity) {
        row = starts[e] + within;
        a.rows.slot_of_row[row] = slot;
      }
    }
    if (slot < end) a.rows.row_of_slot[slot] = row;
    __syncwarp();
    if (e >= 0 && below == 0) hist[warp * n + e] += __popc(same);
    __syncwarp();
  }
}

}  // namespace

void moe_sort(const MoeSortArgs& a) { moe_sort_and_quantize(a, {}); }

void moe_sort_and_quantize(const MoeSortArgs& a, const TokenQuantArgs& tokens) {
  SortPlan plan = plan_sort(a);
  plan.tokens = tokens;
  const auto n = static_cast<size_t>(a.num_experts);
  const auto blocks = static_cast<unsigned>(plan.num_blocks), threads = static_cast<unsigned>(plan.threads);
  if (blocks > 1) launch("moe_sort_count", count_slots_kernel, {blocks, kMaxThreads, n * sizeof(int)}, plan);
  const size_t bytes = ((plan.threads / 32 + 1) * n + 1) * sizeof(int);
  prepare_kernel(place_slots_kernel, {.shared_bytes = device_limits().shared_bytes_per_block});
  const auto token_blocks = static_cast<unsigned>(tokens.num_tokens);
  launch("moe_sort", place_slots_kernel, {blocks + token_blocks, threads, bytes}, plan);
}

}  // namespace fp4moe
