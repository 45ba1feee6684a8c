// gated_delta in chunks, second kernel: the state from chunk to chunk, and the outputs before norm and gate.
//
// Computes:  per sequence and value head, for its chunks in order, with S the state before the chunk,
//              N = T (V - exp(G) K S);   o = exp(G) Q S + P N;   S <- exp(G_last) S + K^T (exp(G_last - G) N)
//            o replaces V. A cluster has a head, and a block 64 of its columns. One warpgroup computes all
//            products, transposed, with wgmma: it keeps S in registers, and the accumulators of one product
//            become the A fragments of another. A thread loads the matrices of chunks ahead, half of them for
//            both blocks.
// Order:     K S; most of Q S; N; the rest of Q S; the new S; P N; the next chunk's K S. So registers are
//            converted for one product while the tensor cores compute another. Registers are too few to have
//            products in flight at the loop's branch, which is therefore before N.
// Shapes:    chunks of 64 rows; dk = dv = 128.
// Bytes:     1024 Hk + 1032 Hv read per row, and 4 Hv dv written; 8 Hv dk dv per sequence and pass.
// Flops:     2 Hv dv (3 dk + 112) per row, times 3.
// Bound:     the tensor cores of two SMs per head, for 2976 cycles per chunk, one chunk after another.
// Numerics:  S in f32; products of bf16 pairs high + low with f32 sums, about 2^-16. A row's bits depend
//            on its position in the chunk and on the rows before, not on other sequences or passes. A cut of
//            the prompt keeps them if it is at a multiple of 64 and both pieces run in chunks.
#include <cstddef>

#include "kernels/cuda/dense/gated_delta_chunks.cuh"
#include "kernels/cuda/ptx/attention_ptx.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe::cuda {
namespace {

constexpr int kBlocks = 2;  // of a cluster
constexpr int kBlockTiles = kDeltaTiles / kBlocks, kBlockColumns = kDeltaDim / kBlocks;
// The warps that compute, the warp that loads, and threads that do the rest.
constexpr int kComputeWarps = 4, kLoadWarp = kComputeWarps, kStateThreads = 256;
constexpr int kFirstHelper = (kLoadWarp + 1) * 32, kHelpers = kStateThreads - kFirstHelper;
constexpr int kStages = 2;
constexpr int kStateSteps = kDeltaDim / 16, kRowSteps = kDeltaChunk / 16, kRowTiles = kDeltaChunk / 8;
constexpr int kStartedSteps = 6;                // of Q S, computed during the first differences
constexpr int kPanelBytes = kDeltaChunk * 128;  // 64 columns of k or q

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

// Operands of wgmma start at multiples of 1024 bytes.
struct ChunkTiles {
  DeltaKeys keys;
  uint8_t t_high[kDeltaSquareBytes], t_low[kDeltaSquareBytes];
  uint8_t p_high[kDeltaSquareBytes], p_low[kDeltaSquareBytes];
  float4 values[kBlockTiles][kRowTiles][32];  // V of the block's columns
};
struct ChunkFactors {
  float from_start[kDeltaChunk], to_end[kDeltaChunk];
};
struct ChunkShared {
  ChunkTiles tiles[kStages];
  ChunkFactors factors[kStages];
  // Barriers. The first products of a chunk read Q, V and T, which are replaced while the others run.
  uint64_t full[kStages], cleared[kStages], halfway[kStages], empty[kStages];
  ChunkRange range;  // read again where it is needed, to save registers
};
constexpr int kSharedBytes = sizeof(ChunkShared);
constexpr int kSquaresBytes = 4 * kDeltaSquareBytes;
static_assert(sizeof(ChunkTiles) % 1024 == 0 && offsetof(DeltaMatrices, from_start) == kSquaresBytes &&
              sizeof(DeltaMatrices) == kSquaresBytes + sizeof(ChunkFactors));
static_assert(1 + kMaxReplayRows < kMinChunkedRows, "graphs of steps that verify drafts have no chunks");

// ---- loads ----

// Loads this block's half for both blocks.
__device__ void load_half(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
  const uint32_t at = ptx::cluster_ctarank() * (bytes / kBlocks);
  ptx::bulk_load_multicast(static_cast<uint8_t*>(to) + at, static_cast<const uint8_t*>(from) + at,
                           bytes / kBlocks, bar, (1 << kBlocks) - 1);
}

// Loads this block's part of every chunk; for one thread.
__device__ void load_chunks(const ChunkParams& p, const ChunkRange& r, ChunkShared& s) {
  const int64_t chunk = r.first - p.first_chunk, heads = p.args.num_value_heads;
  const DeltaKeys* keys = p.keys + chunk * p.args.num_key_heads + r.key_head;
  const DeltaMatrices* matrices = p.matrices + chunk * heads + r.head;
  const DeltaValues* values = p.values + chunk * heads + r.head;
  for (int i = 0; i < r.count; ++i) {
    const int stage = i % kStages;
    ChunkTiles& tiles = s.tiles[stage];
    uint64_t* const full = &s.full[stage];
    const int turn = (i / kStages + 1) % 2;
    if (i >= kStages) ptx::mbarrier_wait(&s.halfway[stage], turn);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(ChunkTiles) + sizeof(ChunkFactors));
    load_half(tiles.keys.q_high, keys->q_high, 2 * kDeltaTileBytes, full);
    ptx::bulk_load(tiles.values, values->of[ptx::cluster_ctarank() * kBlockTiles], sizeof(tiles.values),
                   full);
    load_half(tiles.t_high, matrices->t_high, 2 * kDeltaSquareBytes, full);
    if (i >= kStages) ptx::mbarrier_wait(&s.empty[stage], turn);
    load_half(tiles.keys.k_high, keys->k_high, 2 * kDeltaTileBytes, full);
    load_half(&s.factors[stage], matrices->from_start, sizeof(ChunkFactors), full);
    load_half(tiles.p_high, matrices->p_high, 2 * kDeltaSquareBytes, full);
    keys += p.args.num_key_heads, matrices += heads, values += heads;
  }
}

// Clears the 16 x 16 blocks above the diagonal of T and P of every chunk; for the helpers. They have a row
// and two matrices each; the last 16 rows have no such blocks.
__device__ void clear_chunks(ChunkShared& s) {
  const int helper = static_cast<int>(threadIdx.x) - kFirstHelper, row = helper % 48;
  static_assert(kHelpers == 2 * 48 && kDeltaChunk == 48 + 16);
  for (int i = 0; i < s.range.count; ++i) {
    const int stage = i % kStages;
    uint8_t* const to = s.tiles[stage].t_high + helper / 48 * 2 * kDeltaSquareBytes;
    ptx::mbarrier_wait(&s.full[stage], i / kStages % 2);
    for (int column = (row / 16 + 1) * 16; column < kDeltaChunk; column += 8) {
      uint8_t* const at = to + swizzled(row, column, 128);
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<uint4*>(at + kDeltaSquareBytes) = {};
    }
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(&s.cleared[stage]);
  }
}

// Lets both blocks load what `bar`, halfway or empty, stands for; for a warp that is done with it.
__device__ __forceinline__ void release(uint64_t* bar) {
  __syncwarp();
  if (threadIdx.x % 32 < kBlocks) ptx::mbarrier_arrive_cluster(bar, threadIdx.x % 32);
}

// ---- products ----

// An A fragment of 16 columns, split.
struct SplitFragment {
  uint32_t high[4], low[4];
};

// Accumulators of a product [64 columns of v, n]: c[4 j + i] has row 16 warp + lane / 4 + 8 (i / 2) and
// column 8 j + 2 (lane % 4) + i % 2. Returns columns 16 step ... 16 step + 15 as an A fragment.
template <int kCount>
__device__ __forceinline__ SplitFragment split_columns(const float (&c)[kCount], int step) {
  SplitFragment out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const ptx::SplitPair pair = ptx::split_pair(c[8 * step + 2 * i], c[8 * step + 2 * i + 1]);
    out.high[i] = pair.high, out.low[i] = pair.low;
  }
  keep_registers(out.high);
  keep_registers(out.low);
  return out;
}

// The factors of this thread's two columns of accumulator tile j.
__device__ __forceinline__ float2 column_factors(const float* factors, int j) {
  return *reinterpret_cast<const float2*>(factors + j * 8 + threadIdx.x % 4 * 2);
}

// split_columns of the columns times factors.
__device__ __forceinline__ SplitFragment split_scaled(const float (&c)[32], const float* factors, int step) {
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 f = column_factors(factors, 2 * step + i / 4);
    scaled[i] = c[8 * step + i] * (i % 2 == 0 ? f.x : f.y);
  }
  return split_columns(scaled, 0);
}

// Makes the assembler compute the fragments before a later wait instead of moving the wait up: a store that
// never executes (the address is not 0) keeps them in order.
template <int kCount>
__device__ __forceinline__ void compute_before(const SplitFragment (&x)[kCount], uint32_t address) {
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) all ^= x[i].low[0] ^ x[i].low[1] ^ x[i].low[2] ^ x[i].low[3];
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0;\n@p st.shared.u32 [%1], %0;\n}" ::"r"(all),
               "r"(address)
               : "memory");
}

// A split operand of wgmma: offsets in ChunkTiles. A descriptor of the tiles' start leads to all of them.
struct SplitOperand {
  uint32_t high, low;
};
constexpr SplitOperand kK = {offsetof(ChunkTiles, keys.k_high), offsetof(ChunkTiles, keys.k_low)},
                       kQ = {offsetof(ChunkTiles, keys.q_high), offsetof(ChunkTiles, keys.q_low)},
                       kT = {offsetof(ChunkTiles, t_high), offsetof(ChunkTiles, t_low)},
                       kP = {offsetof(ChunkTiles, p_high), offsetof(ChunkTiles, p_low)};

__device__ __forceinline__ uint64_t tiles_descriptor(const ChunkTiles& tiles) {
  return wgmma_b_descriptor(ptx::shared_address(&tiles), kPanelBytes);
}

// c (+)= x b over 16 columns of x; b: `offset` bytes into an operand, [n, 16] in memory, or if transposed
// [16, n].
template <int kTransposed = 0, int kCount>
__device__ __forceinline__ void add_split_products(float (&c)[kCount], const SplitFragment& x, uint64_t tiles,
                                                   SplitOperand b, uint32_t offset, bool accumulate = true) {
  const uint64_t high = wgmma_b_advance(tiles, b.high + offset), low = wgmma_b_advance(tiles, b.low + offset);
  wgmma<kTransposed>(c, x.low, high, accumulate);
  wgmma<kTransposed>(c, x.high, low, true);
  wgmma<kTransposed>(c, x.high, high, true);
}

// c = S^T m^T over kSteps steps of dk from `first` on, added to c unless that is 0; m: K or Q.
template <int kSteps>
__device__ __forceinline__ void multiply_state(float (&c)[32], const SplitFragment (&state)[kStateSteps],
                                               uint64_t tiles, SplitOperand m, int first) {
  wgmma_fence();
#pragma unroll
  for (int step = first; step < first + kSteps; ++step)
    add_split_products(c, state[step], tiles, m, step / 4 * kPanelBytes + step % 4 * 32, step > 0);
  wgmma_commit();
}

// ---- the chain ----

__device__ __forceinline__ float* state_of(const ChunkParams& p, const ChunkRange& r) {
  return p.args.recurrent(r.sequence.slot, r.head);
}

// S^T of the block: f(element of this thread, its place in the slot's [dk, dv]).
template <class F>
__device__ __forceinline__ void each_state(float (&s)[64], float* state, const F& f) {
  const int lane = lane_read_here(), warp = static_cast<int>(threadIdx.x) / 32;
  const int column = static_cast<int>(ptx::cluster_ctarank()) * kBlockColumns + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 64; ++i)
    f(s[i], state + (i / 4 * 8 + lane % 4 * 2 + i % 2) * kDeltaDim + column + i / 2 % 2 * 8);
}

// Returns V - exp(G) x as fragments in `rows`.
__device__ __forceinline__ void split_differences(float (&x)[32], const ChunkTiles& tiles,
                                                  const float* from_start, SplitFragment (&rows)[kRowSteps]) {
  const float4* const values = &tiles.values[threadIdx.x / 32][0][threadIdx.x % 32];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    const float4 v = values[j * 32];
    const float2 f = column_factors(from_start, j);
    x[4 * j] = v.x - x[4 * j] * f.x, x[4 * j + 1] = v.y - x[4 * j + 1] * f.y;
    x[4 * j + 2] = v.z - x[4 * j + 2] * f.x, x[4 * j + 3] = v.w - x[4 * j + 3] * f.y;
    if (j % 2 == 1) rows[j / 2] = split_columns(x, j / 2);
  }
}

// n = rows T^T, but without the products of the later half of the rows. As T is lower triangular, these are
// for the later half of n's columns only: upper.
__device__ __forceinline__ void multiply_inverse(float (&n)[32], float (&upper)[16],
                                                 const SplitFragment (&rows)[kRowSteps], uint64_t tiles) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kRowSteps / 2; ++step)
    add_split_products(n, rows[step], tiles, kT, step * 32, step > 0);
#pragma unroll
  for (int step = kRowSteps / 2; step < kRowSteps; ++step)
    add_split_products(upper, rows[step], tiles, kT, kDeltaChunk / 2 * 128 + step * 32, step > kRowSteps / 2);
  wgmma_commit();
}

// Starts n = K S, once the tiles of a chunk of the block are there.
__device__ __forceinline__ void multiply_keys(float (&n)[32], const SplitFragment (&state)[kStateSteps],
                                              ChunkShared& s, int chunk) {
  const int stage = chunk % kStages;
  ptx::mbarrier_wait(&s.full[stage], chunk / kStages % 2);
  multiply_state<kStateSteps>(n, state, tiles_descriptor(s.tiles[stage]), kK, 0);
}

// Starts a chunk's products, after K S: most of Q S, and V - exp(G) K S as fragments in `rows`.
__device__ __forceinline__ void start_chunk(float (&n)[32], const SplitFragment (&state)[kStateSteps],
                                            SplitFragment (&rows)[kRowSteps], float (&o)[32],
                                            const ChunkTiles& in, const ChunkFactors& factors) {
  const uint64_t tiles = tiles_descriptor(in);
  multiply_state<kStartedSteps>(o, state, tiles, kQ, 0);
  wgmma_wait<1>();
  keep_registers(n);
  split_differences(n, in, factors.from_start, rows);
  compute_before(rows, ptx::shared_address(&in) + sizeof(in));
  wgmma_wait<0>();  // frees the registers of kStartedSteps fragments
  keep_registers(o);
}

// The other products of a chunk; the last still run. state: S as fragments, replaced by those of the new S.
// o: the outputs.
__device__ __forceinline__ void finish_chunk(float (&s)[64], SplitFragment (&state)[kStateSteps],
                                             SplitFragment (&rows)[kRowSteps], float (&o)[32],
                                             ChunkShared& shared, int stage) {
  const uint64_t tiles = tiles_descriptor(shared.tiles[stage]);
  const ChunkFactors& factors = shared.factors[stage];
  float n[32], upper[16];
  SplitFragment changes[kRowSteps];
  multiply_inverse(n, upper, rows, tiles);
  multiply_state<kStateSteps - kStartedSteps>(o, state, tiles, kQ, kStartedSteps);
  const float shrink = factors.from_start[kDeltaChunk - 1];
#pragma unroll
  for (float& element : s) element *= shrink;
  keep_registers(s);
  wgmma_wait<1>();
  keep_registers(n);
  keep_registers(upper);
#pragma unroll
  for (int i = 0; i < 16; ++i) n[16 + i] += upper[i];
#pragma unroll
  for (int step = 0; step < kRowSteps; ++step) {
    rows[step] = split_scaled(n, factors.to_end, step);
    wgmma_fence();
    add_split_products<1>(s, rows[step], tiles, kK, step * 16 * 128);
    wgmma_commit();
  }
  wgmma_wait<kRowSteps>();
  keep_registers(o);
  release(&shared.halfway[stage]);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float2 f = column_factors(factors.from_start, i / 4);
    o[i] *= i % 2 == 0 ? f.x : f.y;
  }
#pragma unroll
  for (int step = 0; step < kRowSteps; ++step) {
    changes[step] = split_columns(n, step);
    wgmma_fence();
    add_split_products(o, changes[step], tiles, kP, step * 32);
    wgmma_commit();
  }
  wgmma_wait<kRowSteps>();
  keep_registers(s);
#pragma unroll
  for (int step = 0; step < kStateSteps; ++step) state[step] = split_columns(s, step);
}

// Runs all chunks of the block; for the warps that compute.
__device__ void run_chunks(const ChunkParams& p, ChunkShared& s) {
  float state[64], o[32];
  SplitFragment fragments[kStateSteps], rows[kRowSteps];
  const bool is_new = s.range.begins() && chunk_rows(s.range.sequence, s.range.first).is_new;
  const int64_t heads = p.args.num_value_heads;
  const int tile =
      static_cast<int>(ptx::cluster_ctarank()) * kBlockTiles + static_cast<int>(threadIdx.x) / 32;
  float4* out =
      &p.values[(s.range.first - p.first_chunk) * heads + s.range.head].of[tile][0][threadIdx.x % 32];
  each_state(state, state_of(p, s.range), [&](float& x, const float* at) { x = is_new ? 0 : __ldcg(at); });
#pragma unroll
  for (int step = 0; step < kStateSteps; ++step) fragments[step] = split_columns(state, step);
  {
    float n[32];
    multiply_keys(n, fragments, s, 0);
    start_chunk(n, fragments, rows, o, s.tiles[0], s.factors[0]);
  }
#pragma unroll 1
  for (int i = 0; i < s.range.count; ++i) {
    const int stage = i % kStages;
    ptx::mbarrier_wait(&s.cleared[stage], i / kStages % 2);
    finish_chunk(state, fragments, rows, o, s, stage);
    // Starts the next chunk, or the last one again: no branch, as registers are in use by products.
    const int next = min(i + 1, s.range.count - 1);
    float n[32];
    multiply_keys(n, fragments, s, next);
    wgmma_wait<1>();
    keep_registers(o);
    release(&s.empty[stage]);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) out[j * 32] = {o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
    out += heads * int64_t{sizeof(DeltaValues) / sizeof(float4)};
    start_chunk(n, fragments, rows, o, s.tiles[next % kStages], s.factors[next % kStages]);
  }
  each_state(state, state_of(p, s.range), [](float x, float* at) { *at = x; });
}

// Keeps the last inputs of the convolution: the block's columns of v, and for the first value head of a key
// head also those of q (by the first block) and k. For the helpers.
__device__ void store_conv_inputs(const ChunkParams& p, const ChunkRange& r) {
  const GatedDeltaArgs& a = p.args;
  const ChunkRows c = chunk_rows(r.sequence, r.first);
  const int kept = a.conv_width - 1, rank = static_cast<int>(ptx::cluster_ctarank());
  const int64_t keys = int64_t{a.num_key_heads} * kDeltaDim;
  const bool has_keys = r.head % (a.num_value_heads / a.num_key_heads) == 0;
  for (int i = static_cast<int>(threadIdx.x) - kFirstHelper; i < kBlockColumns + (has_keys ? kDeltaDim : 0);
       i += kHelpers) {
    const int64_t channel = i < kBlockColumns
                                ? 2 * keys + int64_t{r.head} * kDeltaDim + rank * kBlockColumns + i
                                : rank * keys + int64_t{r.key_head} * kDeltaDim + i - kBlockColumns;
    float x[kMaxConvWidth - 1];
#pragma unroll
    for (int j = 0; j < kMaxConvWidth - 1; ++j)
      x[j] = j < kept ? chunk_input(a, c, c.num_rows - kept + j, channel) : 0;
#pragma unroll
    for (int j = 0; j < kMaxConvWidth - 1; ++j)
      if (j < kept) a.conv(c.slot)[channel * kept + j] = x[j];
  }
}

// Grid (blocks of a cluster, Hv, sequences with chunks).
__global__ void __launch_bounds__(kStateThreads, 1)
    chunk_states_kernel(const __grid_constant__ ChunkParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  ChunkShared& s = *reinterpret_cast<ChunkShared*>(memory);
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();  // kernels that run beside this one need all that it waited for
  const ChunkRange r = chunk_range(p);
  if (r.sequence.index < 0 || r.count <= 0) return;  // both blocks of the cluster
  if (threadIdx.x == 0) {
    s.range = r;
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&s.full[i], 1);
      ptx::mbarrier_init(&s.cleared[i], kHelpers);
      ptx::mbarrier_init(&s.halfway[i], kBlocks * kComputeWarps);
      ptx::mbarrier_init(&s.empty[i], kBlocks * kComputeWarps);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kComputeWarps) {
    run_chunks(p, s);
  } else if (warp > kLoadWarp) {
    clear_chunks(s);
    if (r.ends()) store_conv_inputs(p, r);
  } else if (threadIdx.x % 32 == 0) {
    load_chunks(p, r, s);
  }
  ptx::cluster_sync();  // no block ends while the other writes to its shared memory
}

}  // namespace

void launch_chunk_states(const ChunkParams& params, int num_sequences) {
  prepare_kernel(chunk_states_kernel, {.shared_bytes = kSharedBytes});
  launch("chunk_states", chunk_states_kernel,
         {.grid = dim3(kBlocks, static_cast<unsigned>(params.args.num_value_heads),
                       static_cast<unsigned>(num_sequences)),
          .block = dim3(kStateThreads),
          .shared_bytes = kSharedBytes,
          .cluster = kBlocks},
         params);
}

}  // namespace fp4moe::cuda
