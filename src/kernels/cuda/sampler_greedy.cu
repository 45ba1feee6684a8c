// The best id of each row: a cluster of 8 blocks a row.
//
// Computes:  SampledRow::status and token_id of greedy rows without log-probabilities.
// Shapes:    logits [rows, V] f32.
// Bytes:     4 rows V, once.   Flops: a comparison an element.
// Bound:     latency: two rounds of reads and one exchange for a row of 200 000; the L2 for many rows.
// Numerics:  exact; of equal logits the lower id.
#include <cooperative_groups.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/sampler_greedy.h"
#include "kernels/cuda/sampler_keys.cuh"

namespace fp4moe {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kThreads = 512, kWarps = kThreads / 32;

// The best id of a part of a row: its key, then the lower id. 0: none; ~0: NaN or +infinity.
__device__ uint64_t best_of(const SampleRowsArgs& a, const float* logits, int begin, int end) {
  constexpr int kAhead = 16;
  uint64_t best = 0;
  for (int first = begin + static_cast<int>(threadIdx.x); first < end; first += kAhead * kThreads) {
    float x[kAhead];
    uint32_t masked[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int id = first + j * kThreads;
      x[j] = id < end ? __ldcg(logits + id) : -kInfinity;
      masked[j] = id < end && a.masked != nullptr ? __ldg(a.masked + id / 32) : 0;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int id = first + j * kThreads;
      const bool is_out = x[j] == -kInfinity || (masked[j] >> (id % 32) & 1) != 0;
      const uint64_t ranked = uint64_t{key_of(x[j])} << 32 | static_cast<uint32_t>(~id);
      best = max(best, x[j] < kInfinity ? (is_out ? 0 : ranked) : ~uint64_t{0});
    }
  }
  return best;
}

// A cluster a row. A row without any id to choose is looked at again by the first block, to tell why.
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kThreads)
    greedy_kernel(const __grid_constant__ SampleRowsArgs a) {
  __shared__ uint64_t warps[kWarps], blocks[kBlocks];
  cg::cluster_group cluster = cg::this_cluster();
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x / kBlocks;
  const int rank = static_cast<int>(cluster.block_rank()), vocab_size = static_cast<int>(a.vocab_size);
  const int part = (vocab_size + kBlocks - 1) / kBlocks;
  const float* logits = a.logits + row * a.row_stride;
  uint64_t best = best_of(a, logits, min(vocab_size, rank * part), min(vocab_size, (rank + 1) * part));
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const uint64_t other : warps) best = max(best, other);
    *cluster.map_shared_rank(&blocks[rank], 0) = best;
  }
  cluster.sync();
  if (rank != 0) return;
  for (const uint64_t other : blocks) best = max(best, other);
  bool is_empty = true;  // nothing but -infinity
  if (best == 0)
    for (int id = static_cast<int>(threadIdx.x); id < vocab_size; id += kThreads)
      if (logits[id] != -kInfinity) is_empty = false;
  is_empty = __syncthreads_and(is_empty) != 0;
  if (threadIdx.x != 0) return;
  const bool is_bad = best == ~uint64_t{0} || (best == 0 && is_empty);
  for (SampledRow* out : {a.out, a.copy}) {
    if (out == nullptr) continue;
    out[row].status = is_bad      ? SampleStatus::kBadLogits
                      : best == 0 ? SampleStatus::kNoToken
                                  : SampleStatus::kOk;
    out[row].token_id = is_bad || best == 0 ? 0 : ~static_cast<int32_t>(best);
    out[row].num_top = 0;
  }
}

}  // namespace

void sample_greedy(const SampleRowsArgs& args) {
  launch("sample_greedy", greedy_kernel,
         {dim3(static_cast<unsigned>(args.num_rows * kBlocks)), dim3(kThreads)}, args);
}

}  // namespace fp4moe
