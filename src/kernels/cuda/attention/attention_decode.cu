// Attention for decode: few rows, each against all of its keys.
//
// Computes   out[t, h] = sum_j softmax_j(scale q[t, h] k[j], sinks[h]) v[j], j in row t's window; if p.rope
//            is set, q and the new key are normed (if p.rope.norm is set) and rotated first, and the new key
//            and value stored in their pages; if p.gate is set, out is multiplied by sigmoid(gate).
// Shapes     q f32 [T, q_stride]; pages bf16 or E4M3 [pages, kv_heads, page_size, row]; out bf16 or f32
//            [T, heads * v_dim]. Head dims are multiples of 16: up to 128 with G <= 16 query heads per kv
//            head, up to 256 with G <= 8.
// Bytes      2 (bf16) or 1 (E4M3) * (k_dim + v_dim) per row, kv head and key, each read once.
// Flops      2 * G * (k_dim + v_dim) per row, kv head and key.
// Bound      HBM; with short contexts, the latency of queries, exchange and outputs.
// Design     A cluster of up to 8 thread blocks of W warps serves one row and kv head; it has no more thread
//            blocks than the row has blocks of 16 (bf16) or 32 keys (E4M3). Warp w of n takes the key
//            blocks w, w + n, ... A warp gathers keys and values into its own part of shared memory with
//            cp.async, S blocks ahead, and warps never wait for each other. Eight lanes fetch 128 bytes of a
//            row, so that a cache line costs the L2 one request: with two requests, of half a line each, the
//            L2, not HBM, is the bottleneck. The 16-byte chunks serve as mma.sync's fragments unchanged: the
//            order of a contraction is free, so 8 contiguous elements serve two k steps (keys) or eight
//            columns (values, paired with the next key's values by prmt). Finally, the warps (workers) send
//            their sums to the thread blocks that add up the columns, in worker order. With rope, loads of
//            the pages that earlier steps wrote are in flight before the kernel waits for the projections;
//            the new key and value are rounded from f32 and stored in their pages and in shared memory.
// Numerics   q and the weights are rounded to bf16; over E4M3 pages to f16, in which the codes are exact; a
//            q beyond f16's range is an infinity. The scale of the keys is in scale_log2, that of the values
//            multiplies the output's sums. Sums are f32, and the softmax has base 2. A row's bits
//            are the same for the same number of warps, which depends only on the padded batch and the row's
//            context. Rope: as in rope.cu.
#include <algorithm>

#include "device/stream.h"
#include "kernels/cuda/attention/attention_decode_blocks.cuh"
#include "kernels/cuda/attention/attention_new_token.cuh"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/ptx/attention_ptx.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

template <int D>
struct Config {
  static constexpr int kUnits = D / 16;  // of 16 output columns, per head
};

// Returns the number of parts in a block's shared memory, for up to `splits` blocks.
int shared_parts(int units, int splits, int warps) { return (units + splits - 1) * warps; }

// A thread's part of the rotations for the row's position, and of the sinks. inv_freq and sink are weights,
// which no kernel writes, so they are loaded at once and used while the first keys are in flight.
template <int D, int W>
struct Prepared {
  static constexpr int kNormThreads = std::min(W * 32, 128),
                       kNormLoads = (D + kNormThreads - 1) / kNormThreads;
  float inv_freq = 0, sink = 0;
  float norms[2][kNormLoads];

  __device__ __forceinline__ Prepared(const AttentionParams& p, int kv_head) {
    const int i = static_cast<int>(threadIdx.x);
    if constexpr (kHasNorms<D>)
      if (p.rope.norm.q != nullptr && i < kNormThreads)
#pragma unroll
        for (int n = 0; n < kNormLoads; ++n) {
          norms[0][n] = __ldg(p.rope.norm.q + i + n * kNormThreads);
          norms[1][n] = __ldg(p.rope.norm.k + i + n * kNormThreads);
        }
    if (p.rope.k != nullptr && i < p.rope.half) inv_freq = __ldg(p.rope.inv_freq + i);
    if (p.sinks != nullptr && i < p.group) sink = __ldg(p.sinks + kv_head * p.group + i);
  }
  // Puts the norms, rotations and sinks into shared memory. Called by all threads; ends with a block barrier.
  template <class P, int S>
  __device__ __forceinline__ void put(const AttentionParams& p, int position,
                                      Shared<P, D, S, W>& shared) const {
    const int i = static_cast<int>(threadIdx.x);
    if constexpr (kHasNorms<D>)
      if (p.rope.norm.q != nullptr && i < kNormThreads)
#pragma unroll
        for (int n = 0; n < kNormLoads; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) shared.norms[j][i + n * kNormThreads] = norms[j][n];
    if (p.rope.k != nullptr && i < p.rope.half) {
      Turn turn;
      sincosf(static_cast<float>(position) * inv_freq, &turn.sine, &turn.cosine);
      shared.turns[i] = {turn.cosine * p.rope.factor, turn.sine * p.rope.factor};
    }
    if (p.sinks != nullptr && i < p.group) shared.sinks[i] = sink;
    __syncthreads();
  }
};

// Pairs of query elements in the order of multiply_keys()'s contraction; all loads are issued before the
// first is used.
template <int D>
struct Queries {
  static constexpr int kHeads = kLaneHeads<D>, kPairs = 2 * kHeads;
  float2 x[D / 16][kPairs];

  __device__ __forceinline__ static int dim(int step, int i) {
    return (step / 2 * 4 + static_cast<int>(threadIdx.x) % 4) * 8 + step % 2 * 4 + i / kHeads * 2;
  }
  __device__ __forceinline__ void load(const AttentionParams& p, int row, int kv_head) {
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int head = static_cast<int>(threadIdx.x) % 32 / 4 + i % kHeads * 8, d = dim(step, i);
        x[step][i] = {0, 0};
        if (head < p.group && d < p.k_dim)
          x[step][i] = __ldcg(reinterpret_cast<const float2*>(
              p.q + row * p.q_stride + static_cast<int64_t>(kv_head * p.group + head) * p.k_dim + d));
      }
  }
  // Norms each head. weights: [D], in shared memory.
  __device__ __forceinline__ void norm(const float* weights, float eps) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float sum = 0;
#pragma unroll
      for (int step = 0; step < D / 16; ++step)
#pragma unroll
        for (int i = head; i < kPairs; i += kHeads)
          sum += x[step][i].x * x[step][i].x + x[step][i].y * x[step][i].y;
      const float inverse = inverse_rms(quad_sum(sum), D, eps);
#pragma unroll
      for (int step = 0; step < D / 16; ++step)
#pragma unroll
        for (int i = head; i < kPairs; i += kHeads) {
          const float* by = weights + dim(step, i);
          x[step][i].x *= inverse * by[0], x[step][i].y *= inverse * by[1];
        }
    }
  }
  // kHalf: half of the rotary dims, a multiple of 32.
  template <int kHalf>
  __device__ __forceinline__ void rotate(const Turn* turns) {
#pragma unroll
    for (int step = 0; step < kHalf / 16; ++step)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const Turn* by = turns + dim(step, i);
        turn(x[step][i].x, x[step + kHalf / 16][i].x, by[0]);
        turn(x[step][i].y, x[step + kHalf / 16][i].y, by[1]);
      }
  }
  // Makes q's fragments. turns: null, or the `half` rotations for the position.
  template <class P>
  __device__ __forceinline__ void put(const Turn* turns, int half, Warp<D>& w) {
    if constexpr (kRotatesAll<D>)
      if (turns != nullptr && half == D / 2) rotate<D / 2>(turns);
    if constexpr (kRotatesPart<D>)
      if (turns != nullptr && half == kPartHalf) rotate<kPartHalf>(turns);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
#pragma unroll
      for (int i = 0; i < kPairs; ++i) w.q[step][i] = P::pair(x[step][i].x, x[step][i].y);
  }
};

// Turns logits into weights, the A fragments for the product with the values, and rescales the sums so far.
template <class P, int D>
__device__ __forceinline__ void weigh(const AttentionParams& p, float (&s)[P::kBlockKeys / 8][4],
                                      int first_key, int2 keys, Warp<D>& w,
                                      uint32_t (&weights)[P::kBlockKeys / 16][2 * kLaneHeads<D>]) {
  constexpr int kTiles = P::kBlockKeys / 8, kHeads = kLaneHeads<D>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2 * kHeads; ++i) {
      const int key = first_key + 8 * tile + 2 * (lane % 4) + i % 2;
      s[tile][i] = key >= keys.x && key <= keys.y ? s[tile][i] * p.scale_log2 : -INFINITY;
    }
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
    float largest = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
    for (int tile = 1; tile < kTiles; ++tile)
      largest = fmaxf(largest, fmaxf(s[tile][2 * r], s[tile][2 * r + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(w.largest[r], fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)));
    const float rescale = ex2(w.largest[r] - largest);
    w.largest[r] = largest;
    w.denominator[r] *= rescale;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) w.out[n][2 * r] *= rescale, w.out[n][2 * r + 1] *= rescale;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float a = ex2(s[tile][2 * r] - largest), b = ex2(s[tile][2 * r + 1] - largest);
      w.denominator[r] += a + b;
      weights[tile / 2][r + tile % 2 * kHeads] = P::pair(a, b);
    }
  }
}

// A warp's share of a row: among the key blocks that cover [keys.x, keys.y], block number `worker` and every
// stride-th block after it.
struct Share {
  int row, sequence, kv_head;
  int2 keys;
  int worker, stride;
};

// Processes the warp's share. S blocks are in flight, each in its own stage of shared memory; the page rows
// of the next block are looked up one block ahead:
//
//   before the preceding kernels end   rows_of(b0 .. bS)   load b0 .. bS-1   (cached keys only)
//   after grid_dependency_wait()       queries; the newest key, which a preceding kernel computed
//   block b, in stage b % S            wait for b | keys, weights, values | load b + S | rows_of(b + S + 1)
//
// The newest key is stored in its page, and put into its block in shared memory once that block has landed.
template <class P, int D, int S, int W>
__device__ __forceinline__ void attend(const AttentionParams& p, const Share& share,
                                       const Prepared<D, W>& prepared, Shared<P, D, S, W>& shared,
                                       Warp<D>& w) {
  const auto [row, sequence, kv_head, keys, worker, stride] = share;
  const int lane = threadIdx.x % 32;
  constexpr int kBlockKeys = P::kBlockKeys;
  const int end = keys.y / kBlockKeys + 1;
  auto rows_of = [&](int block) {  // keys outside the row's range are clamped to it and masked
    const int key = min(max(block * kBlockKeys + lane % kBlockKeys, keys.x), keys.y);
    return page_row(p, sequence, kv_head, key);
  };
  int block = keys.x / kBlockKeys + worker, next_rows = 0, new_row = 0;
  if (block < end) {
    int rows[S];
#pragma unroll
    for (int i = 0; i < S; ++i) rows[i] = rows_of(block + i * stride);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      if (block + i * stride < end) load_block(p, rows[i], i, shared);
      ptx::cp_async_commit();
    }
    next_rows = rows_of(block + S * stride);
    new_row = page_row(p, sequence, kv_head, keys.y);
  }
  const bool has_new = p.rope.k != nullptr && (end - 1 - block) % stride == 0;
  NewToken<P, D> token;
  Queries<D> queries;
  prepared.put(p, keys.y, shared);
  ptx::grid_dependency_wait();
  if (block >= end) return;  // not earlier: all warps must reach put()'s barrier
  queries.load(p, row, kv_head);
  if (has_new) token.load(p, row, kv_head);
  if constexpr (kHasNorms<D>)
    if (p.rope.norm.q != nullptr) {
      queries.norm(shared.norms[0], p.rope.norm.eps);
      if (has_new) token.norm(shared.norms[1], p.rope.norm.eps);
    }
  queries.template put<P>(p.rope.k != nullptr ? shared.turns : nullptr, p.rope.half, w);
  if (has_new) token.put(p, keys.y % kBlockKeys, new_row, shared.turns);
  for (int stage = 0; block < end; block += stride) {
    ptx::cp_async_wait<S - 1>();
    __syncwarp();  // every lane's copies have landed
    if (has_new && block == end - 1) put_new_token(token, stage, block * kBlockKeys, keys, shared);
    float s[kBlockKeys / 8][4] = {};
    uint32_t weights[kBlockKeys / 16][2 * kLaneHeads<D>];
    multiply_keys(shared, stage, w, s);
    weigh<P>(p, s, block * kBlockKeys, keys, w, weights);
    multiply_values(shared, stage, weights, w);
    __syncwarp();  // the stage has been read
    if (block + S * stride < end) load_block(p, next_rows, stage, shared);
    ptx::cp_async_commit();
    next_rows = rows_of(block + (S + 1) * stride);
    stage = stage == S - 1 ? 0 : stage + 1;
  }
}

// Sends the warp's sums to the blocks that add up their columns: unit u (of 16 columns) is sent to block u %
// splits.
template <class P, int D, int S, int W>
__device__ __forceinline__ void send_parts(const AttentionParams& p, int worker, int splits, Warp<D>& w,
                                           Shared<P, D, S, W>& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kLaneHeads<D>; ++r) {
    w.denominator[r] += __shfl_xor_sync(~0u, w.denominator[r], 1);
    w.denominator[r] += __shfl_xor_sync(~0u, w.denominator[r], 2);
    const int head = lane / 4 + 8 * r;
    if (head >= p.group) continue;
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      const int unit = head * Config<D>::kUnits + 4 * c + lane % 4;
      WorkerSums* part = &shared.parts[unit / splits * splits * W + worker];
      const uint32_t to = ptx::map_cluster(ptx::shared_address(part), unit % splits);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 x;
        x.x = w.out[8 * c + i % 2 * 4][2 * r + i / 2], x.y = w.out[8 * c + i % 2 * 4 + 1][2 * r + i / 2];
        x.z = w.out[8 * c + i % 2 * 4 + 2][2 * r + i / 2], x.w = w.out[8 * c + i % 2 * 4 + 3][2 * r + i / 2];
        ptx::st_cluster(to + 16 * i, x);
      }
      ptx::st_cluster(to + 64, float4{w.largest[r], w.denominator[r], 0, 0});
    }
  }
}

// Output number i of this block: an element of a head. Units of 16 elements are dealt to the blocks in turn.
template <int D>
struct Output {
  int unit, head, d;  // head: of all heads
  bool exists;

  __device__ __forceinline__ Output(const AttentionParams& p, int kv_head, int splits, int i)
      : unit(i / 16 * splits + static_cast<int>(blockIdx.x)),
        head(kv_head * p.group + unit / Config<D>::kUnits),
        d(unit % Config<D>::kUnits * 16 + i % 16),
        exists(unit < p.group * Config<D>::kUnits && d < p.v_dim) {}
  __device__ __forceinline__ float load_gate(const AttentionParams& p, int row) const {
    if (p.gate == nullptr || !exists) return 0;
    return __ldcg(p.gate + row * p.gate_stride + static_cast<int64_t>(head) * p.v_dim + d);
  }
};

// Computes this block's columns of the row's outputs; the first num_busy workers had keys. next_gate: of the
// thread's first output.
template <class P, int D, int S, int W>
__device__ __forceinline__ void add_parts(const AttentionParams& p, const Share& share, int num_busy,
                                          float next_gate, const Shared<P, D, S, W>& shared) {
  constexpr int kUnits = Config<D>::kUnits;
  const int row = share.row, workers = share.stride;
  for (int i = threadIdx.x;; i += W * 32) {
    const auto [unit, head, d, exists] = Output<D>(p, share.kv_head, workers / W, i);
    if (unit >= p.group * kUnits) return;
    const float gate = next_gate;
    next_gate = Output<D>(p, share.kv_head, workers / W, i + W * 32).load_gate(p, row);
    if (!exists) continue;
    const WorkerSums* parts = &shared.parts[i / 16 * workers];
    const float sink = p.sinks != nullptr ? shared.sinks[unit / kUnits] * kLog2e : -INFINITY;
    float largest = sink, sum = 0;
#pragma unroll 8
    for (int j = 0; j < num_busy; ++j) largest = fmaxf(largest, parts[j].largest);
    float denominator = p.sinks != nullptr ? ex2(sink - largest) : 0;
#pragma unroll 8
    for (int j = 0; j < num_busy; ++j) {
      const float rescale = parts[j].denominator != 0 ? ex2(parts[j].largest - largest) : 0;
      denominator += rescale * parts[j].denominator, sum += rescale * parts[j].sums[i % 16];
    }
    const int64_t at = row * p.out_cols + static_cast<int64_t>(head) * p.v_dim + d;
    const float y = sum * p.v_scale / denominator, factor = p.gate != nullptr ? 1 / (1 + expf(-gate)) : 1;
    if (p.out_f32)
      static_cast<float*>(p.out)[at] = y * factor;
    else  // rounded twice, as by separate ops
      static_cast<__nv_bfloat16*>(p.out)[at] =
          __float2bfloat16_rn(__bfloat162float(__float2bfloat16_rn(y)) * factor);
  }
}

// Writes this block's share of a padding row's zeros.
__device__ __forceinline__ void clear_row(const AttentionParams& p, int row, int kv_head) {
  const int cols = p.group * p.v_dim;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < cols; i += gridDim.x * blockDim.x) {
    const int64_t at = row * p.out_cols + static_cast<int64_t>(kv_head) * cols + i;
    if (p.out_f32)
      static_cast<float*>(p.out)[at] = 0;
    else
      static_cast<uint16_t*>(p.out)[at] = 0;
  }
}

// Warps for which an SM's registers must suffice.
template <int D, int W>
constexpr int kSmWarps = W == 8 || D == 64 ? 16
                         : D == 128        ? 8
                                           : 4;

template <class P, int D, int S, int W>
__global__ void __launch_bounds__(W * 32, kSmWarps<D, W> / W)
    attention_decode(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared<P, D, S, W>& shared = *reinterpret_cast<Shared<P, D, S, W>*>(memory);
  ptx::grid_dependents_launch();
  const int row = blockIdx.z, kv_head = blockIdx.y;
  const int last = static_cast<int>(p.positions[row]), sequence = p.row_sequence[row];
  const Prepared<D, W> prepared(p, kv_head);
  if (p.rope.k == nullptr) ptx::grid_dependency_wait();  // a preceding kernel stores the newest key
  if (sequence < 0) {
    ptx::grid_dependency_wait();
    return clear_row(p, row, kv_head);
  }
  const int2 keys = {p.window > 0 ? max(0, last - p.window + 1) : 0, last};
  const int num_blocks = keys.y / P::kBlockKeys - keys.x / P::kBlockKeys + 1;
  // More warps than blocks of keys, if there are thread blocks for them, which share the outputs. Large heads
  // have so many outputs that blocks without keys share them, too.
  const int splits = D > 128 ? static_cast<int>(gridDim.x) : min(static_cast<int>(gridDim.x), num_blocks);
  if (static_cast<int>(blockIdx.x) >= splits) return;  // cluster barriers count exited blocks as arrived
  ptx::cluster_arrive_relaxed();
  Warp<D> w;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2 * kLaneHeads<D>; ++i) w.out[n][i] = 0;
#pragma unroll
  for (int r = 0; r < kLaneHeads<D>; ++r) w.largest[r] = -INFINITY, w.denominator[r] = 0;
  const int worker = static_cast<int>(threadIdx.x / 32 * splits + blockIdx.x);
  const Share share{row, sequence, kv_head, keys, worker, splits * W};
  attend(p, share, prepared, shared, w);
  ptx::cluster_wait();  // all blocks have started: their shared memory can be written
  const int num_busy = min(num_blocks, splits * W);
  if (worker < num_busy) send_parts(p, worker, splits, w, shared);
  ptx::cluster_arrive();
  const float gate = Output<D>(p, kv_head, splits, static_cast<int>(threadIdx.x)).load_gate(p, row);
  ptx::cluster_wait();
  add_parts(p, share, num_busy, gate, shared);
}

// S: blocks of keys that a warp has in shared memory, including the block being processed. W: warps per
// block. splits: blocks per cluster.
template <class P, int D, int S, int W>
void launch(const AttentionParams& p, int splits) {
  constexpr int kMaxBytes = 227 * 1024;
  prepare_kernel(attention_decode<P, D, S, W>, {.shared_bytes = kMaxBytes, .shares_sm = S == 1});
  const int parts = shared_parts(p.group * Config<D>::kUnits, splits, W);
  const size_t bytes = sizeof(Shared<P, D, S, W>) + static_cast<size_t>(parts - 1) * sizeof(WorkerSums);
  const dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(p.num_rows));
  fp4moe::launch("attention_decode", attention_decode<P, D, S, W>,
                 {grid, dim3(W * 32), bytes, static_cast<unsigned>(splits)}, p);
}

constexpr int kMostSplits = 8;  // a cluster of 16 starts only if a GPC has room for all its blocks

int64_t num_blocks(const AttentionParams& p, int splits) {
  return int64_t{p.num_rows} * p.num_kv_heads * splits;
}

// Launches decode for heads of up to 64 elements. With one block of keys per warp in shared memory, the
// linear layers before and after decode have room to load their weights sooner; this is done if a warp gets
// only one block of keys, or if every thread block has an SM to itself (it then fits beside QKV's block with
// up to 120 registers per thread). Otherwise a warp has two blocks of keys if three thread blocks per SM
// would need a second wave (with two blocks of keys, four share an SM), and three if not. If four per SM need
// a second wave too, thread blocks have two warps, and eight share an SM: the latencies at a row's beginning
// and end then count once.
template <class P>
void launch_small_heads(const AttentionParams& p, int splits, int64_t max_keys) {
  const int64_t num_sms = device_limits().num_sms;
  if (splits > kMostSplits && num_blocks(p, kMostSplits) <= num_sms)
    return launch<P, 64, 1, 8>(p, kMostSplits);
  if (splits <= kMostSplits && max_keys <= (splits * 4 - 1) * P::kBlockKeys)
    return launch<P, 64, 1, 4>(p, splits);
  if (splits == 1 && num_blocks(p, 1) > 4 * num_sms) return launch<P, 64, 2, 2>(p, 1);
  splits = std::min(splits, kMostSplits);
  num_blocks(p, splits) > 3 * num_sms ? launch<P, 64, 2, 4>(p, splits) : launch<P, 64, 3, 4>(p, splits);
}

// Launches decode for heads of up to 128 elements: two thread blocks of four warps share an SM, or four of
// two if two per SM need a second wave; one of eight warps has an SM to itself.
template <class P>
void launch_large_heads(const AttentionParams& p, int splits) {
  if (splits > kMostSplits && num_blocks(p, kMostSplits) <= device_limits().num_sms)
    return launch<P, 128, 2, 8>(p, kMostSplits);
  if (splits == 1 && num_blocks(p, 1) > 2 * device_limits().num_sms) return launch<P, 128, 2, 2>(p, 1);
  launch<P, 128, 2, 4>(p, std::min(splits, kMostSplits));
}

template <class P>
void launch_decode(const AttentionParams& p, int splits, int64_t max_keys) {
  if (p.k_dim <= 64) return launch_small_heads<P>(p, splits, max_keys);
  if (p.k_dim <= 128) return launch_large_heads<P>(p, splits);
  launch<P, 256, 2, 4>(p, std::min(splits, kMostSplits));  // one thread block per SM
}

}  // namespace

void launch_attention_decode(const AttentionParams& p, int splits, int64_t max_keys) {
  (p.is_fp8 ? launch_decode<E4m3Pages> : launch_decode<Bf16Pages>)(p, splits, max_keys);
}

}  // namespace fp4moe::cuda
