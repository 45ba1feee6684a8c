// Finds the best id of each row, with a cluster of 1 to 8 blocks per row.
//
// Computes:  SampledRow::status and token_id of greedy rows without log-probabilities; put_ids may replace
//            the id. If the ranks of a group have a shard of the ids each, every rank sends its best id of
//            each row to all ranks and puts the tokens of its own rows.
// Shapes:    logits [rows, V] f32; of a rank: [rows, any part of V].
// Bytes:     4 rows V, once; 8 rows to each of R - 1 peers.
// Flops:     a comparison per element.
// Bound:     latency: two rounds of reads and one exchange for a row of 200 000; the L2 for many rows. Over
//            ranks also that of a store to a peer and of a poll.
// Measured:  on an H200 with V = 201088 and a mask, in a model's step: 7.0 us for one row, 24.7 us for 64.
// Numerics:  exact; among equal logits, the lower id is chosen.
#include <cooperative_groups.h>

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/sampling/sampler_greedy.h"
#include "kernels/cuda/sampling/sampler_keys.cuh"

namespace fp4moe {
namespace {

namespace cg = cooperative_groups;

// Threads per block: more if there are too few rows to fill the GPU. An SM has room for kMaxThreads of them.
constexpr int kMaxBlocks = 8, kMaxThreads = 1024, kThreads = 512;

// The choice among a range of ids: key << 32 | kLastId - id of the best id, or one of these values. The
// choice among several ranges is the largest of theirs. No half of a choice is kUnsent.
constexpr uint32_t kLastId = 0x7fffffffu;
constexpr uint64_t kEmpty = 0;                          // only -infinity
constexpr uint64_t kAllMasked = 1;                      // no id to choose, but not only -infinity
constexpr uint64_t kBad = uint64_t{0xff800000u} << 32;  // NaN or +infinity, whose key this is

// Returns the bits of a.masked for the 32 ids from first_id + column on; `column` is a multiple of 32. Bits
// at and after first_id + end are unspecified.
__device__ __forceinline__ uint32_t masked_bits(const SampleRowsArgs& a, int first_id, int column, int end) {
  if (a.masked == nullptr || column >= end) return 0;
  const int word = (first_id + column) / 32, shift = first_id % 32;
  const uint32_t low = __ldg(a.masked + word);
  if (shift == 0) return low;
  const uint32_t high = (word + 1) * 32 < first_id + end ? __ldg(a.masked + word + 1) : 0;
  return __funnelshift_r(low, high, shift);
}

// Returns the choice among columns [begin, end) of a row, without telling kEmpty from kAllMasked; `begin` is
// a multiple of 32.
__device__ uint64_t best_of(const SampleRowsArgs& a, int first_id, const float* logits, int begin, int end) {
  constexpr int kAhead = 16;
  const int step = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x) % 32;
  float best = -kInfinity;
  int best_column = -1;
  bool is_bad = false;
  for (int first = begin + static_cast<int>(threadIdx.x) - lane; first < end; first += kAhead * step) {
    // The masks of the warp's columns for load `lane`.
    const uint32_t masks = lane < kAhead ? masked_bits(a, first_id, first + lane * step, end) : 0;
    float x[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int column = first + j * step + lane;
      x[j] = column < end ? __ldcg(logits + column) : -kInfinity;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      is_bad |= !(x[j] < kInfinity);
      const bool is_masked = (__shfl_sync(~0u, masks, j) >> lane & 1) != 0;
      if (x[j] > best && !is_masked) best = x[j], best_column = first + j * step + lane;
    }
  }
  if (is_bad) return kBad;
  if (best_column < 0) return kEmpty;
  return uint64_t{key_of(best)} << 32 | (kLastId - static_cast<uint32_t>(first_id + best_column));
}

struct Bests {
  uint64_t warps[kMaxThreads / 32], blocks[kMaxBlocks];
};

__device__ __forceinline__ int blocks_of_cluster() {
  return static_cast<int>(cg::this_cluster().num_blocks());
}
__device__ __forceinline__ int row_of_cluster() { return static_cast<int>(blockIdx.x) / blocks_of_cluster(); }
__device__ __forceinline__ bool is_first_of_cluster() { return cg::this_cluster().block_rank() == 0; }

// Returns the choice in the cluster's row, in the cluster's first block; unspecified in the other blocks. If
// there is no id to choose, the first block reads the row again to find out why.
__device__ uint64_t best_of_row(const SampleRowsArgs& a, int first_id, Bests& shared) {
  cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), num_ids = static_cast<int>(a.vocab_size);
  const int blocks = blocks_of_cluster(), part = (num_ids + 32 * blocks - 1) / (32 * blocks) * 32;
  const float* logits = a.logits + row_of_cluster() * a.row_stride;
  uint64_t best = best_of(a, first_id, logits, min(num_ids, rank * part), min(num_ids, (rank + 1) * part));
  for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < blockDim.x / 32; ++i) best = max(best, shared.warps[i]);
    *cluster.map_shared_rank(&shared.blocks[rank], 0) = best;
  }
  cluster.sync();
  if (rank != 0) return best;
  for (int i = 0; i < blocks; ++i) best = max(best, shared.blocks[i]);
  if (best != kEmpty) return best;
  bool is_empty = true;
  for (int i = static_cast<int>(threadIdx.x); i < num_ids; i += static_cast<int>(blockDim.x))
    if (logits[i] != -kInfinity) is_empty = false;
  return __syncthreads_and(is_empty) != 0 ? kEmpty : kAllMasked;
}

__device__ void put_token(const SampleRowsArgs& a, int64_t row, uint64_t best) {
  const bool is_bad = best >= kBad || best == kEmpty;
  bool has_token = !is_bad && best != kAllMasked;
  int32_t id = has_token ? static_cast<int32_t>(kLastId - static_cast<uint32_t>(best)) : 0;
  if (has_token && a.put_ids != nullptr) {
    id = __ldg(a.put_ids + id);
    if (id < 0) has_token = false, id = 0;
  }
  for (SampledRow* out : {a.out, a.copy}) {
    if (out == nullptr) continue;
    out[row].status = is_bad      ? SampleStatus::kBadLogits
                      : has_token ? SampleStatus::kOk
                                  : SampleStatus::kNoToken;
    out[row].token_id = id;
    out[row].num_top = 0;
  }
}

__global__ void __launch_bounds__(kMaxThreads) greedy_kernel(const __grid_constant__ SampleRowsArgs a) {
  __shared__ Bests shared;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const uint64_t best = best_of_row(a, 0, shared);
  if (is_first_of_cluster() && threadIdx.x == 0) put_token(a, row_of_cluster(), best);
}

// ---- ranks with a shard of the ids each -----------------------------------------------------------

struct ShardArgs {
  SampleRowsArgs rows;  // of this rank's ids; num_rows and the results are those of this rank's rows
  CommGroup group;
  CommOp op;
  int first_id;
  int num_rows, first_row;  // rows of this launch; the first one of this rank, which may be outside
  bool all_start;           // all blocks run at once
};

__device__ __forceinline__ uint64_t take_choice(const cuda::Operation& o, int peer, int64_t row) {
  const uint2 words = cuda::take_words(o, peer, cuda::words_at<uint2>(o, o.group.rank, peer) + row);
  return cuda::has_arrived(words) ? uint64_t{words.x} << 32 | words.y : kBad;  // kBad: the group has failed
}

// Puts the tokens of those rows from `begin` on that are this rank's. One thread per rank and row waits for
// that rank's choice.
__device__ void put_tokens(const ShardArgs& a, const cuda::Operation& o, int begin, int end) {
  constexpr int kSources = kMaxGroupRanks;
  static_assert(32 % kSources == 0, "the threads of a row are in one warp");
  const int source = static_cast<int>(threadIdx.x) % kSources;
  for (int first = begin; first < end; first += static_cast<int>(blockDim.x) / kSources) {
    const int row = first + static_cast<int>(threadIdx.x) / kSources, own = row - a.first_row;
    const bool is_row = row < end;
    uint64_t best = kEmpty;
    if (is_row && source < a.group.size) best = o.failed ? kBad : take_choice(o, source, row);
    for (int offset = kSources / 2; offset > 0; offset /= 2)
      best = max(best, __shfl_xor_sync(~0u, best, offset));
    if (is_row && source == 0 && own >= 0 && own < a.rows.num_rows) put_token(a.rows, own, best);
  }
}

// Each cluster sends its row's choice to all ranks, also to its own, and waits for the other ranks' choices.
// If not all blocks run at once, only the block that was the last to start waits, for all rows, so that no
// block is kept from starting by one that waits. One SM then stores all results in pinned memory, which takes
// longer.
__global__ void __launch_bounds__(kMaxThreads) greedy_shard_kernel(const __grid_constant__ ShardArgs a) {
  __shared__ Bests shared;
  __shared__ bool waits;
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const cuda::Operation o(a.group, a.op);
  if (threadIdx.x == 0) waits = o.entered_last();  // best_of_row() has a barrier
  const uint64_t best = best_of_row(a.rows, a.first_id, shared);
  const int peer = static_cast<int>(threadIdx.x);
  if (is_first_of_cluster() && peer < a.group.size && !o.failed)
    cuda::store_words(cuda::words_at<uint2>(o, peer, a.group.rank) + row_of_cluster(),
                      uint2{static_cast<uint32_t>(best >> 32), static_cast<uint32_t>(best)});
  if (a.all_start && is_first_of_cluster()) put_tokens(a, o, row_of_cluster(), row_of_cluster() + 1);
  if (!a.all_start && waits) put_tokens(a, o, 0, a.num_rows);
}

bool all_start(const LaunchShape& shape) {
  return may_start_early() &&
         int64_t{shape.grid.x} * shape.block.x <= int64_t{device_limits().num_sms} * kMaxThreads;
}

// As many blocks per row as run at once.
LaunchShape shape_of(int64_t num_rows) {
  const int64_t sms = device_limits().num_sms;
  const int threads = kMaxBlocks * num_rows <= sms ? kMaxThreads : kThreads;
  unsigned blocks = kMaxBlocks;
  while (blocks > 1 && blocks * num_rows * threads > sms * kMaxThreads) blocks /= 2;
  return {dim3(static_cast<unsigned>(num_rows) * blocks), dim3(static_cast<unsigned>(threads)), 0, blocks};
}

// Samples as many rows at a time as have room for their choices in the heap.
void sample_shards(const SampleRowsArgs& rows, const LogitShard& shard) {
  FP4MOE_CHECK(rows.all_greedy, "rows that are not greedy need the logits of all ids");
  const int64_t most = shard.group.layout.word_bytes / int64_t{sizeof(uint2)};
  FP4MOE_CHECK(most > 0, "the group's heap has no room for words");
  FP4MOE_CHECK(shard.first_row >= 0 && shard.first_row + rows.num_rows <= shard.num_rows,
               std::to_string(rows.num_rows) + " rows from row " + std::to_string(shard.first_row) +
                   " on of " + std::to_string(shard.num_rows));
  for (int64_t first = 0; first < shard.num_rows; first += most) {
    ShardArgs args{.rows = rows,
                   .group = shard.group,
                   .op = shard.op,
                   .first_id = static_cast<int>(shard.first_id),
                   .num_rows = static_cast<int>(std::min(most, shard.num_rows - first)),
                   .first_row = static_cast<int>(shard.first_row - first)};
    const LaunchShape shape = shape_of(args.num_rows);
    args.all_start = all_start(shape);
    args.rows.logits += first * rows.row_stride;
    launch("sample_shards", greedy_shard_kernel, shape, args);
  }
}

}  // namespace

void sample_greedy(const SampleRowsArgs& args) {
  launch("sample_greedy", greedy_kernel, shape_of(args.num_rows), args);
}

SampleShards cuda_sample_shards() { return sample_shards; }

}  // namespace fp4moe
