// gated_delta in chunks, second kernel: the state from chunk to chunk, and the outputs.
//
// Computes:  per sequence and value head, for its chunks in order, with S the state before the chunk,
//              N = T (V - exp(G) K S);   o = exp(G) Q S + P N;   S <- exp(G_last) S + K^T (exp(G_last - G) N)
//            and the norm and gate of o. A cluster has a head, and a block 32 of its columns. In a block, a
//            warp keeps 16 columns of S in registers, transposed: the accumulators of one product are the A
//            fragments of the next. A second warp gets S and N from it and computes o. A third loads the
//            matrices of chunks ahead, a quarter of them for all blocks of the cluster.
// Shapes:    chunks of 64 rows; dk = dv = 128.
// Bytes:     1024 Hk + 1032 Hv + 4 Hv dv read per row, and 2 Hv dv written; 8 Hv dk dv per sequence and pass.
// Flops:     2 Hv (3 dk dv + 64 dv) per row, times 3.
// Bound:     few heads: the latency of one chunk after another; many heads: Tensor Cores.
// Numerics:  S in f32; products of bf16 pairs high + low with f32 sums, about 2^-16. A row's bits depend
//            on its position in the chunk and on the rows before, not on other sequences or passes. A cut of
//            the prompt keeps them if it is at a multiple of 64 and both pieces run in chunks.
#include <cuda_bf16.h>

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kernels/cuda/dense/gated_delta_chunks.cuh"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::cuda {
namespace {

constexpr int kBlocks = 4;                             // of a cluster
constexpr int kTilesPerBlock = kDeltaTiles / kBlocks;  // each has a warp for S and one for o
constexpr int kConsumers = 2 * kTilesPerBlock, kStateThreads = (kConsumers + 1) * 32;
constexpr int kStages = 2;
constexpr int kSteps = kDeltaDim / 16, kRowTiles = kDeltaChunk / 8;
constexpr int kTerms = kDeltaDim / 8;  // accumulators of a warp's S

struct ChunkStage {
  DeltaKeys keys;
  DeltaMatrices matrices;
};
struct ChunkShared {
  ChunkStage stages[kStages];
  uint4 states[kTilesPerBlock][kSteps][2][32];        // S of a tile as split A fragments
  float4 values[kTilesPerBlock][kRowTiles][32];       // V, then N of a tile, as accumulators
  float squares[2][kDeltaTiles][kDeltaChunk];         // of o, by all blocks, of even and odd chunks
  uint64_t full[kStages], empty[kStages], summed[2];  // barriers
};
static_assert(sizeof(DeltaKeys) % (16 * kBlocks) == 0 && sizeof(DeltaMatrices) % (16 * kBlocks) == 0);
static_assert(1 + kMaxReplayRows < kMinChunkedRows, "graphs of steps that verify drafts have no chunks");

// Named barriers between a tile's two warps. The second warp reads N and loads the next chunk's V in its
// place.
enum ChunkSignal : int { kStateFilled, kStateFree, kValuesFilled, kChangesFilled, kNumSignals };
__device__ int signal_id(int tile, ChunkSignal signal) { return 1 + tile * kNumSignals + signal; }

// A block's work.
struct ChunkRange {
  ChunkedSequence sequence;
  int head, key_head, first, count;  // chunks of the pass
  __device__ bool begins() const { return first == sequence.first_chunk; }
  __device__ bool ends() const { return first + count == sequence.first_chunk + sequence.num_chunks; }
};

__device__ ChunkRange chunk_range(const ChunkParams& p) {
  ChunkRange r;
  r.sequence = find_sequence(p, -1, static_cast<int>(blockIdx.z));
  r.head = static_cast<int>(blockIdx.y);
  r.key_head = r.head / (p.args.num_value_heads / p.args.num_key_heads);
  r.first = max(r.sequence.first_chunk, p.first_chunk);
  r.count = min(r.sequence.first_chunk + r.sequence.num_chunks, p.first_chunk + p.num_chunks) - r.first;
  return r;
}

__device__ void load_quarter(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
  const uint32_t at = ptx::cluster_ctarank() * (bytes / kBlocks);
  ptx::bulk_load_multicast(static_cast<uint8_t*>(to) + at, static_cast<const uint8_t*>(from) + at,
                           bytes / kBlocks, bar, (1 << kBlocks) - 1);
}

// Loads this block's part of every chunk's matrices; for one thread.
__device__ void load_chunks(const ChunkParams& p, const ChunkRange& r, ChunkShared& s) {
  for (int i = 0; i < r.count; ++i) {
    const int stage = i % kStages;
    const int64_t chunk = r.first + i - p.first_chunk;
    if (i >= kStages) ptx::mbarrier_wait(&s.empty[stage], (i / kStages + 1) % 2);
    ptx::mbarrier_arrive_expect_tx(&s.full[stage], sizeof(ChunkStage));
    load_quarter(&s.stages[stage].keys, p.keys + chunk * p.args.num_key_heads + r.key_head, sizeof(DeltaKeys),
                 &s.full[stage]);
    load_quarter(&s.stages[stage].matrices, p.matrices + chunk * p.args.num_value_heads + r.head,
                 sizeof(DeltaMatrices), &s.full[stage]);
  }
}

// Frees the stage for the loads of all blocks; for a warp that is done with it.
__device__ void release_stage(ChunkShared& s, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 < kBlocks) ptx::mbarrier_arrive_cluster(&s.empty[stage], threadIdx.x % 32);
}

__device__ SplitTile split_tile(const uint8_t* high, const uint8_t* low, int row_bytes) {
  return {ptx::shared_address(high), ptx::shared_address(low), row_bytes};
}

template <int kCount>
__device__ __forceinline__ void clear(float (&c)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
}

// c = x m^T for a lower triangular m [chunk, chunk]; x: accumulators of [columns, chunk].
__device__ __forceinline__ void add_triangular(float (&c)[kRowTiles][4], const float (&x)[kRowTiles][4],
                                               const SplitTile& m) {
#pragma unroll
  for (int step = 0; step < kDeltaChunk / 16; ++step)
    add_products<false>(c, split_fragment(x[2 * step], x[2 * step + 1]), m, step, 0, step);
}

// c[row] *= factors[row], the rows being the accumulators' columns.
__device__ __forceinline__ void scale_rows(float (&c)[kRowTiles][4], const float* factors) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(factors + n * 8 + threadIdx.x % 4 * 2);
    c[n][0] *= f.x, c[n][1] *= f.y, c[n][2] *= f.x, c[n][3] *= f.y;
  }
}

// c = exp(G) x S, transposed, for x = K or Q.
__device__ __forceinline__ void multiply_states(float (&c)[kRowTiles][4],
                                                const uint4 (&states)[kSteps][2][32], const SplitTile& x,
                                                const float* from_start) {
  clear(c);
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const uint4 high = states[step][0][threadIdx.x % 32], low = states[step][1][threadIdx.x % 32];
    add_products<false>(c, {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}}, x, step, 0, 0);
  }
  scale_rows(c, from_start);
}

// A tile's columns of S, transposed: s[n] has rows 8 n ... 8 n + 7 of S.
struct StateTile {
  float s[kTerms][4];

  // f(element of this thread, its place in the slot's [dk, dv])
  template <class F>
  __device__ __forceinline__ void each(float* state, int column, const F& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kTerms; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        f(s[n][i], state + (n * 8 + lane % 4 * 2 + i % 2) * kDeltaDim + column + lane / 4 + i / 2 * 8);
  }
  // Writes S as split A fragments, for both warps.
  __device__ __forceinline__ void publish(uint4 (&to)[kSteps][2][32]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const SplitFragment f = split_fragment(s[2 * step], s[2 * step + 1]);
      to[step][0][threadIdx.x % 32] = {f.high[0], f.high[1], f.high[2], f.high[3]};
      to[step][1][threadIdx.x % 32] = {f.low[0], f.low[1], f.low[2], f.low[3]};
    }
  }
  // S <- exp(G_last) S + K^T n; n: scaled to the end of the chunk.
  __device__ __forceinline__ void advance(const float (&n)[kRowTiles][4], const ChunkStage& in) {
    const float shrink = in.matrices.from_start[kDeltaChunk - 1];
#pragma unroll
    for (int i = 0; i < kTerms; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i][j] *= shrink;
    const SplitTile k = split_tile(in.keys.k_high, in.keys.k_low, kDeltaDim * 2);
#pragma unroll
    for (int step = 0; step < kDeltaChunk / 16; ++step) {
      const SplitFragment a = split_fragment(n[2 * step], n[2 * step + 1]);
      add_products<true>(s, a, k, step, 0, 0);
      add_products<true>(s + 8, a, k, step, 4, 0);
    }
  }
};

__device__ __forceinline__ void get_values(const float4 (&from)[kRowTiles][32], float (&x)[kRowTiles][4]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const float4 v = from[n][threadIdx.x % 32];
    x[n][0] = v.x, x[n][1] = v.y, x[n][2] = v.z, x[n][3] = v.w;
  }
}

// x = V - x
__device__ __forceinline__ void subtract_from(const float4 (&values)[kRowTiles][32],
                                              float (&x)[kRowTiles][4]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const float4 v = values[n][threadIdx.x % 32];
    x[n][0] = v.x - x[n][0], x[n][1] = v.y - x[n][1], x[n][2] = v.z - x[n][2], x[n][3] = v.w - x[n][3];
  }
}

// The warp that keeps S of the block's tile.
__device__ void run_states(const ChunkParams& p, const ChunkRange& r, int tile, ChunkShared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = (static_cast<int>(ptx::cluster_ctarank()) * kTilesPerBlock + tile) * kDeltaTileCols;
  const ChunkRows rows = chunk_rows(p, r.sequence, r.first);
  float* const slot = p.args.recurrent(rows.slot, r.head);
  const bool is_new = r.begins() && rows.is_new;
  StateTile state;
  state.each(slot, column, [&](float& x, const float* at) { x = is_new ? 0 : __ldcg(at); });
  for (int i = 0; i < r.count; ++i) {
    const int stage = i % kStages;
    const ChunkStage& in = s.stages[stage];
    float x[kRowTiles][4], n[kRowTiles][4];
    if (i > 0) ptx::named_barrier(signal_id(tile, kStateFree), 64);
    state.publish(s.states[tile]);
    ptx::named_barrier_arrive(signal_id(tile, kStateFilled), 64);
    ptx::mbarrier_wait(&s.full[stage], i / kStages % 2);
    multiply_states(x, s.states[tile], split_tile(in.keys.k_high, in.keys.k_low, kDeltaDim * 2),
                    in.matrices.from_start);
    ptx::named_barrier(signal_id(tile, kValuesFilled), 64);
    subtract_from(s.values[tile], x);
    clear(n);
    add_triangular(n, x, split_tile(in.matrices.t_high, in.matrices.t_low, kDeltaChunk * 2));
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) s.values[tile][j][lane] = {n[j][0], n[j][1], n[j][2], n[j][3]};
    ptx::named_barrier_arrive(signal_id(tile, kChangesFilled), 64);
    scale_rows(n, in.matrices.to_end);
    state.advance(n, in);
    release_stage(s, stage);
  }
  state.each(slot, column, [](float x, float* at) { *at = x; });
}

// The outputs of 16 columns of a chunk: o[n] has rows 8 n ... 8 n + 7, transposed.
struct OutputTile {
  float o[kRowTiles][4];

  __device__ __forceinline__ void add_changes(const float (&n)[kRowTiles][4], const ChunkStage& in) {
    add_triangular(o, n, split_tile(in.matrices.p_high, in.matrices.p_low, kDeltaChunk * 2));
  }
  // Sends the rows' sums of squares over the tile's columns to all blocks of the cluster.
  __device__ __forceinline__ void send_squares(float (&squares)[kDeltaChunk], uint64_t* summed) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float own[2] = {};  // of rows 8 (lane / 4) + 2 (lane % 4) + {0, 1}
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = o[n][i] * o[n][i] + o[n][i + 2] * o[n][i + 2];
        for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (lane / 4 == n) own[i] = sum;
      }
    for (uint32_t rank = 0; rank < kBlocks; ++rank) {
      const uint32_t to = ptx::map_cluster(ptx::shared_address(squares + lane * 2), rank);
      ptx::st_cluster(to, own[0]);
      ptx::st_cluster(to + 4, own[1]);
    }
    __syncwarp();
    if (lane < kBlocks) ptx::mbarrier_arrive_release_cluster(summed, static_cast<uint32_t>(lane));
  }
};

// z at the places of an OutputTile.
struct GateTile {
  float z[kRowTiles][4];

  __device__ __forceinline__ void load(const ChunkParams& p, const ChunkRows& c, int64_t column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float* at = p.args.z + c.batch_row(lane % 4 * 2) * p.args.z_stride + column + lane / 4;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n, at += 8 * p.args.z_stride)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        z[n][i] = c.has(n * 8 + lane % 4 * 2 + i % 2) ? __ldcg(at + i % 2 * p.args.z_stride + i / 2 * 8) : 0;
  }
};

__device__ __forceinline__ void store_output(const ActRows& out, int64_t at, float y) {
  if (out.dtype == DType::kF32)
    static_cast<float*>(out.data)[at] = y;
  else
    static_cast<bf16*>(out.data)[at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(y));
}

// column: of all heads.
__device__ void store_outputs(const ChunkParams& p, const ChunkRows& c, int64_t column, const OutputTile& out,
                              const GateTile& gates, const float (&squares)[kDeltaTiles][kDeltaChunk]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, first = lane % 4 * 2;
  const float weights[2] = {__ldg(p.args.norm_weight + column % kDeltaDim + lane / 4),
                            __ldg(p.args.norm_weight + column % kDeltaDim + lane / 4 + 8)};
  int64_t at = c.batch_row(first) * p.args.out.cols + column + lane / 4;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n, at += 8 * p.args.out.cols) {
    float2 sum = {0, 0};  // of two rows
#pragma unroll
    for (int t = 0; t < kDeltaTiles; ++t) {
      const float2 of_tile = *reinterpret_cast<const float2*>(squares[t] + n * 8 + first);
      sum.x += of_tile.x, sum.y += of_tile.y;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!c.has(n * 8 + first + j)) continue;
      const float inverse = 1 / sqrtf((j == 0 ? sum.x : sum.y) / kDeltaDim + p.args.eps);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float z = gates.z[n][2 * i + j], silu_z = z / (1 + expf(-z));
        store_output(p.args.out, at + j * p.args.out.cols + i * 8,
                     out.o[n][2 * i + j] * inverse * weights[i] * silu_z);
      }
    }
  }
}

// Starts to load a chunk's V for the first warp.
__device__ __forceinline__ void load_values(const float4 (&from)[kRowTiles][32],
                                            float4 (&to)[kRowTiles][32]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
    ptx::cp_async16(ptx::shared_address(&to[n][threadIdx.x % 32]), &from[n][threadIdx.x % 32], 16);
  ptx::cp_async_commit();
}

// The warp that computes the outputs of the block's tile, and loads its V. A chunk's outputs are normed
// during the next chunk, when the other blocks' squares have arrived.
__device__ void run_outputs(const ChunkParams& p, const ChunkRange& r, int tile, ChunkShared& s) {
  const int tile_of_head = static_cast<int>(ptx::cluster_ctarank()) * kTilesPerBlock + tile;
  const int64_t column = int64_t{r.head} * kDeltaDim + tile_of_head * kDeltaTileCols;
  const int64_t heads = p.args.num_value_heads;
  const DeltaValues* values = p.values + (r.first - p.first_chunk) * heads + r.head;
  ChunkRows rows = chunk_rows(p, r.sequence, r.first);  // of the chunk whose outputs are not normed yet
  OutputTile out, next;
  GateTile gates;
  const auto finish = [&](int i) {
    ptx::mbarrier_wait_acquire_cluster(&s.summed[i % 2], i / 2 % 2);
    store_outputs(p, rows, column, out, gates, s.squares[i % 2]);
    rows.offset += kDeltaChunk;
  };
  load_values(values->of[tile_of_head], s.values[tile]);
  ptx::cp_async_wait<0>();
  ptx::named_barrier_arrive(signal_id(tile, kValuesFilled), 64);
  for (int i = 0; i < r.count; ++i) {
    const int stage = i % kStages;
    const bool has_next = i + 1 < r.count;
    const ChunkStage& in = s.stages[stage];
    ptx::mbarrier_wait(&s.full[stage], i / kStages % 2);
    ptx::named_barrier(signal_id(tile, kStateFilled), 64);
    multiply_states(next.o, s.states[tile], split_tile(in.keys.q_high, in.keys.q_low, kDeltaDim * 2),
                    in.matrices.from_start);
    if (has_next) ptx::named_barrier_arrive(signal_id(tile, kStateFree), 64);
    if (i > 0) finish(i - 1);
    gates.load(p, rows, column);
    out = next;
    ptx::named_barrier(signal_id(tile, kChangesFilled), 64);
    float n[kRowTiles][4];
    get_values(s.values[tile], n);
    if (has_next) load_values((values += heads)->of[tile_of_head], s.values[tile]);
    out.add_changes(n, in);
    release_stage(s, stage);
    if (has_next) {
      ptx::cp_async_wait<0>();
      ptx::named_barrier_arrive(signal_id(tile, kValuesFilled), 64);
    }
    out.send_squares(s.squares[i % 2][tile_of_head], &s.summed[i % 2]);
  }
  finish(r.count - 1);
}

// Keeps the last inputs of the convolution: the block's columns of v, and by one block those of q and k.
__device__ void store_conv_inputs(const ChunkParams& p, const ChunkRange& r) {
  const GatedDeltaArgs& a = p.args;
  const ChunkRows c = chunk_rows(p, r.sequence, r.first);
  const int kept = a.conv_width - 1, columns = kTilesPerBlock * kDeltaTileCols;
  const int64_t keys = int64_t{a.num_key_heads} * kDeltaDim;
  const auto store = [&](int64_t channel) {
    for (int i = 0; i < kept; ++i)
      a.conv(c.slot)[channel * kept + i] = chunk_input(a, c, c.num_rows - kept + i, channel);
  };
  const int rank = static_cast<int>(ptx::cluster_ctarank()), first = static_cast<int>(threadIdx.x);
  for (int i = first; i < columns; i += kStateThreads)
    store(2 * keys + int64_t{r.head} * kDeltaDim + rank * columns + i);
  if (rank != 0 || r.head % (a.num_value_heads / a.num_key_heads) != 0) return;
  for (int i = first; i < 2 * kDeltaDim; i += kStateThreads)
    store(i / kDeltaDim * keys + int64_t{r.key_head} * kDeltaDim + i % kDeltaDim);
}

// Grid (blocks of a cluster, Hv, sequences with chunks).
__global__ void __launch_bounds__(kStateThreads, 1)
    chunk_states_kernel(const __grid_constant__ ChunkParams p) {
  extern __shared__ uint4 shared[];
  ChunkShared& s = *reinterpret_cast<ChunkShared*>(shared);
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const ChunkRange r = chunk_range(p);
  if (r.sequence.index < 0 || r.count <= 0) return;  // all blocks of the cluster
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&s.full[i], 1);
      ptx::mbarrier_init(&s.empty[i], kBlocks * kConsumers);
    }
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&s.summed[i], kDeltaTiles);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kConsumers) {
    if (warp % 2 == 0)
      run_states(p, r, warp / 2, s);
    else
      run_outputs(p, r, warp / 2, s);
  } else if (threadIdx.x % 32 == 0) {
    load_chunks(p, r, s);
  }
  if (r.ends()) store_conv_inputs(p, r);
  ptx::cluster_sync();  // no block ends while others write to its shared memory
}

// The most chunks of rows of num_sequences sequences.
int64_t most_chunks(int64_t rows, int64_t num_sequences) {
  return (rows + num_sequences * 2 * (kDeltaChunk - 1)) / kDeltaChunk;
}

int64_t bytes_per_chunk(const GatedDeltaArgs& args) {
  return args.num_key_heads * int64_t{sizeof(DeltaKeys)} +
         args.num_value_heads * int64_t{sizeof(DeltaMatrices) + sizeof(DeltaValues)};
}

bool chunks_fit(const GatedDeltaArgs& args) {
  return args.key_head_dim == kDeltaDim && args.value_head_dim == kDeltaDim;
}

}  // namespace

void launch_chunk_states(const ChunkParams& params, int num_sequences) {
  prepare_kernel(chunk_states_kernel, {.shared_bytes = static_cast<int>(sizeof(ChunkShared))});
  launch("chunk_states", chunk_states_kernel,
         {.grid = dim3(kBlocks, static_cast<unsigned>(params.args.num_value_heads),
                       static_cast<unsigned>(num_sequences)),
          .block = dim3(kStateThreads),
          .shared_bytes = sizeof(ChunkShared),
          .cluster = kBlocks},
         params);
}

void gated_delta_chunks(const GatedDeltaArgs& args) {
  FP4MOE_CHECK(args.workspace != nullptr, "no workspace");
  const DeviceBatch& batch = *args.device_batch;
  const DeviceStates& states = batch.states;
  // The longest sequence, and as many of the shortest that run in chunks as the other rows can be.
  const int64_t num_sequences = std::min(
      states.num_sequences, 1 + std::max<int64_t>(0, batch.num_rows - states.max_rows) / kMinChunkedRows);
  const int64_t chunks = most_chunks(batch.num_rows, num_sequences),
                passes = ceil_div(chunks, kMaxPassChunks);
  ChunkParams p;
  p.args = args;
  p.sequences = states;
  p.num_chunks = static_cast<int>(ceil_div(chunks, passes));
  p.keys = reinterpret_cast<DeltaKeys*>(args.workspace);
  p.matrices = reinterpret_cast<DeltaMatrices*>(p.keys + int64_t{p.num_chunks} * args.num_key_heads);
  p.values = reinterpret_cast<DeltaValues*>(p.matrices + int64_t{p.num_chunks} * args.num_value_heads);
  for (; p.first_chunk < chunks; p.first_chunk += p.num_chunks) {
    launch_chunk_matrices(p);
    launch_chunk_states(p, static_cast<int>(num_sequences));
  }
}

int64_t gated_delta_workspace_bytes(const GatedDeltaArgs& args, int64_t max_tokens) {
  if (!chunks_fit(args) || max_tokens < kMinChunkedRows) return 0;
  const int64_t chunks = most_chunks(max_tokens, max_tokens / kMinChunkedRows);
  return std::min<int64_t>(chunks, kMaxPassChunks) * bytes_per_chunk(args);
}

void gated_delta_by_length(const GatedDeltaArgs& args, ThreadPool& pool) {
  const DeviceBatch& batch = *args.device_batch;
  const int64_t max_rows = batch.states.max_rows;
  if (!chunks_fit(args) || max_rows < kMinChunkedRows) return gated_delta(args, pool);
  if (batch.num_rows > max_rows || args.slots.num_replay_rows > 0)
    gated_delta_rows(args, kMinChunkedRows - 1);
  ref::check_gated_delta(args);
  gated_delta_chunks(args);
}

}  // namespace fp4moe::cuda
