// gated_delta in chunks, first kernel: what a chunk's rows alone determine.
//
// Computes:  per chunk and key head the convolved and normed k and q, and per value head the convolved v, T
//            and P of gated_delta_chunks.cuh. With A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i, the
//            changes of the state are N = (I + A)^-1 diag(beta) (V - exp(G) K S).
//            A warp convolves 8 rows of a part (q, k or the v of a value head) in registers: a lane has 4
//            channels. Then four warps multiply q with k and write P, and four multiply k with k and invert
//            I + A (gated_delta_inverse.cuh), for two value heads at once; every warp that is done takes a
//            piece of v, until none is left.
// Shapes:    chunks of 64 rows; dk = dv = 128; a block per chunk and key head.
// Bytes:     4 (2 Hk dk + Hv dv) read per row, and 1024 Hk + 1032 Hv written.
// Flops:     2 * 64 (2 Hk dk + Hv 64 / 3) per row, times 3 for the products of k and q.
// Bound:     HBM.
// Numerics:  products of bf16 pairs high + low with f32 sums, about 2^-16; the inverse in f32. Sums of g in
//            f64, split into two floats, because exp(G_i - G_j) near 1 may have a large G: the difference of
//            the high parts is rounded relative to itself, and that of the low parts adds the rest. No
//            exponent is positive.
#include "base/check.h"
#include "kernels/cuda/dense/gated_delta_convolve.cuh"
#include "kernels/cuda/dense/gated_delta_inverse.cuh"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kInverters = kChunkWarps / 2;   // warps; the others multiply q
constexpr int kPair = 2;                      // value heads whose A are inverted at once
constexpr int kStagedStride = kDeltaDim + 4;  // floats of a row; pads against bank conflicts
constexpr int kFewTaps = 4;                   // the width of most models
constexpr float kMinLogDecay = -1000;         // exp() of it is 0
constexpr float kNever = -1e30f;              // an exponent past the diagonal

// The gates of a value head.
struct ChunkGates {
  float2 sums[kDeltaChunk];  // G = x + y
  float beta[kDeltaChunk];
};

// What the block works on; in shared memory, because registers are few.
struct BlockWork {
  ChunkRows rows;
  int group;       // value heads of the key head
  int first_head;  // index of the first of them in the next kernel's data
};

// Followed by the taps of all parts, [parts][taps][kDeltaDim].
struct alignas(16) MatricesShared {
  union {
    DeltaKeys keys;
    struct {
      // A below the diagonal; at and above it the inverse, transposed.
      float squares[kPair][kDeltaChunk * kSquareStride];
      float staged[kChunkWarps][kPieceRows * kStagedStride];  // v
    } after;
  };
  ChunkGates gates[kMaxDeltaCluster];
  BlockWork work;
  int next_piece;  // of v
};

// k or q, split.
struct KeyTile {
  uint8_t *high, *low;
};
__device__ __forceinline__ KeyTile key_tile(DeltaKeys& keys, bool is_q) {
  return {is_q ? keys.q_high : keys.k_high, is_q ? keys.q_low : keys.k_low};
}

// Scales the rows to the norm and writes them to a tile of the block and to the next kernel's.
__device__ __forceinline__ void split_rows(const float4 (&rows)[kPieceRows], float norm, int first,
                                           const KeyTile& tile, const KeyTile& out) {
  const int column = lane_index() * 4;
  float sums[kPieceRows];
#pragma unroll
  for (int r = 0; r < kPieceRows; ++r) sums[r] = sum_of_squares(0, rows[r]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
    for (int r = 0; r < kPieceRows; ++r) sums[r] += __shfl_xor_sync(~0u, sums[r], offset);
#pragma unroll
  for (int r = 0; r < kPieceRows; ++r) {
    const float4 x = rows[r];
    const float scale = norm * rsqrtf(sums[r] + kDeltaNormEps);
    const ptx::SplitPair front = ptx::split_pair(x.x * scale, x.y * scale),
                         back = ptx::split_pair(x.z * scale, x.w * scale);
    const uint2 of_high = {front.high, back.high}, of_low = {front.low, back.low};
    const int at = key_offset(first + r, column);
    *reinterpret_cast<uint2*>(tile.high + at) = of_high;
    *reinterpret_cast<uint2*>(tile.low + at) = of_low;
    *reinterpret_cast<uint2*>(out.high + at) = of_high;
    *reinterpret_cast<uint2*>(out.low + at) = of_low;
  }
}

// Fetches the inputs of all gates into the L2.
__device__ void prefetch_gates(const ChunkParams& p, const ChunkRows& c, int group) {
  const int row = static_cast<int>(threadIdx.x) % kDeltaChunk,
            of = static_cast<int>(threadIdx.x) / kDeltaChunk;
  const int64_t at = c.batch_row(row) * p.args.ba_stride + int64_t{blockIdx.y} * group;
  if (of < 2 && c.has(row)) ptx::prefetch_l2((of == 0 ? p.args.a : p.args.b) + at);
}

// Sets a value head's gates, and writes their factors; for one warp.
__device__ void sum_gates(const ChunkParams& p, const ChunkRows& c, int head, ChunkGates& gates,
                          DeltaMatrices& out) {
  const int lane = lane_index();
  double g[2];
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const int64_t at = c.batch_row(row) * p.args.ba_stride + head;
    g[i] = 0;
    if (c.has(row)) {
      const float x = __ldcg(p.args.a + at) + __ldg(p.args.dt_bias + head);
      const float softplus_x = fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
      g[i] = fmaxf(__ldg(p.args.decay + head) * softplus_x, kMinLogDecay);
    }
    gates.beta[row] = c.has(row) ? 1 / (1 + expf(-__ldcg(p.args.b + at))) : 0;
  }
  double end = g[0] + g[1];  // the sum up to this lane
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(~0u, end, offset);
    if (lane >= offset) end += other;
  }
  const double last = __shfl_sync(~0u, end, 31), sums[2] = {end - g[1], end};
  for (int i = 0; i < 2; ++i) {
    const float high = static_cast<float>(sums[i]);
    gates.sums[2 * lane + i] = {high, static_cast<float>(sums[i] - high)};
    out.from_start[2 * lane + i] = expf(high);
    out.to_end[2 * lane + i] = expf(static_cast<float>(last - sums[i]));
  }
}

// exp(x) for x <= 0, to about 2^-23 of 1.
__device__ __forceinline__ float exp_of_negative(float x) {
  constexpr float kLog2E = 1.44269504f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kLog2E));
  return power;
}

// Products of 16 rows of k or q, from row 16 `block` on, with the k of the rows up to them, as accumulators:
// c[n] has columns 8 n ... 8 n + 7.
struct RowProducts {
  float c[kDeltaChunk / 8][4] = {};
  int block;

  __device__ __forceinline__ void multiply(DeltaKeys& keys, bool is_q) {
    const int lane = lane_index();
    const uint32_t k_high = ptx::shared_address(keys.k_high), k_low = ptx::shared_address(keys.k_low);
    const KeyTile own = key_tile(keys, is_q);
    const uint32_t high = ptx::shared_address(own.high), low = ptx::shared_address(own.low);
#pragma unroll 1
    for (int step = 0; step < kDeltaDim / 16; ++step) {
      const int at = key_offset(block * 16 + lane % 16, step * 16 + lane / 16 * 8);
      uint32_t a[2][4], b[4][2][4];  // {high, low}; b: of 16 columns
      ptx::load_matrices(a[0], high + at);
      ptx::load_matrices(a[1], low + at);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        if (m > block) break;
        const int from = key_offset(m * 16 + lane % 8 + lane / 16 * 8, step * 16 + lane / 8 % 2 * 8);
        ptx::load_matrices(b[m][0], k_high + from);
        ptx::load_matrices(b[m][1], k_low + from);
      }
      // The three products of a tile are apart, because each waits for the one before.
#pragma unroll
      for (int term = 0; term < 3; ++term)
#pragma unroll
        for (int n = 0; n < kDeltaChunk / 8; ++n) {
          if (n / 2 > block) break;
          const uint32_t* const of_b = b[n / 2][term == 1] + n % 2 * 2;
          ptx::mma_bf16(c[n], a[term == 0], of_b[0], of_b[1]);
        }
    }
  }

  // f(row, column, x, y) for the products of the pairs of columns {column, column + 1}, times the decay
  // between the rows. Those past the diagonal are 0.
  template <class F>
  __device__ __forceinline__ void each_decayed(const ChunkGates& gates, const F& f) const {
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block * 16 + half * 8 + lane / 4;
      const float2 g = gates.sums[row];
#pragma unroll
      for (int n = 0; n < kDeltaChunk / 8; ++n) {
        if (n / 2 > block) break;
        const int column = n * 8 + lane % 4 * 2;
        const float4 of = *reinterpret_cast<const float4*>(gates.sums + column);
        const float exponents[2] = {g.x - of.x + (g.y - of.y), g.x - of.z + (g.y - of.w)};
        f(row, column, c[n][half * 2] * exp_of_negative(column <= row ? exponents[0] : kNever),
          c[n][half * 2 + 1] * exp_of_negative(column < row ? exponents[1] : kNever));
      }
    }
  }
};

__device__ __forceinline__ void write_pair(uint8_t* high, uint8_t* low, int row, int column, float x,
                                           float y) {
  const ptx::SplitPair pair = ptx::split_pair(x, y);
  const int at = swizzled(row, column, kDeltaChunk * 2);
  *reinterpret_cast<uint32_t*>(high + at) = pair.high;
  *reinterpret_cast<uint32_t*>(low + at) = pair.low;
}

// Writes 16 columns of the inverse, times beta.
__device__ __forceinline__ void write_inverse(const float* square, int first, const ChunkGates& gates,
                                              DeltaMatrices& out) {
  const int lane = lane_index(), column = first + lane % 8 * 2;
  const float2 beta = *reinterpret_cast<const float2*>(gates.beta + column);
  const float* const own = square + column * kSquareStride;
#pragma unroll 1
  for (int block = first; block < kDeltaChunk; block += 16)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = block + i * 4 + lane / 8;
      write_pair(out.t_high, out.t_low, row, column, column <= row ? own[row] * beta.x : 0,
                 column < row ? own[kSquareStride + row] * beta.y : 0);
    }
}

// Writes T of all value heads, kPair at once; for the warps that multiplied k.
__device__ void write_inverses(const ChunkParams& p, const RowProducts& products, MatricesShared& s) {
  const int pair = warp_index() / 2, part = warp_index() % 2, group = s.work.group;
  for (int head = 0; head < group; head += kPair) {
    if (head > 0) ptx::named_barrier(1, kInverters * 32);  // the squares were read
    for (int i = 0; i < min(kPair, group - head); ++i) {
      const ChunkGates& gates = s.gates[head + i];
      products.each_decayed(gates, [&](int row, int column, float x, float y) {
        const float beta = gates.beta[row];
        *reinterpret_cast<float2*>(s.after.squares[i] + row * kSquareStride + column) = {beta * x, beta * y};
      });
    }
    ptx::named_barrier(1, kInverters * 32);
    if (head + pair >= group) continue;
    float* const square = s.after.squares[pair];
    invert_half(square, part * kHalf);
    ptx::named_barrier(2 + pair, 64);
    join_halves(square, part * 16);
    __syncwarp();
    DeltaMatrices& out = p.matrices[s.work.first_head + head + pair];
    write_inverse(square, part * 16, s.gates[head + pair], out);
    write_inverse(square, 48 - part * 16, s.gates[head + pair], out);
  }
}

// Writes P of all value heads; for the warps that multiplied q.
__device__ void write_products(const ChunkParams& p, const RowProducts& products, MatricesShared& s) {
  const int group = s.work.group;
  DeltaMatrices* const matrices = p.matrices + s.work.first_head;
  for (int head = 0; head < group; ++head)
    products.each_decayed(s.gates[head], [&](int row, int column, float x, float y) {
      write_pair(matrices[head].p_high, matrices[head].p_low, row, column, x, y);
    });
}

// Writes v of 8 rows; for one warp.
__device__ __forceinline__ void write_values(const float* staged, int first, DeltaValues& out) {
  const int lane = lane_index();
  const float* const from = staged + lane % 4 * 2 * kStagedStride + lane / 4;
#pragma unroll
  for (int tile = 0; tile < kDeltaTiles; ++tile) {
    const float* const v = from + tile * kDeltaTileCols;
    out.of[tile][first / 8][lane] = {v[0], v[kStagedStride], v[8], v[kStagedStride + 8]};
  }
}

// Convolves q and k; for all warps. The rows of k are on their way while those of q are normed and written.
template <int kTaps>
__device__ __forceinline__ void convolve_keys(const ChunkParams& p, const float* taps, MatricesShared& s) {
  const int warp = warp_index(), channel = lane_index() * 4, group = s.work.group;
  const ChunkRows c = s.work.rows;
  DeltaKeys& out = p.keys[blockIdx.x * p.args.num_key_heads + blockIdx.y];
  PartRows<kTaps> rows;
#pragma unroll 1
  for (int part = -1; part < 2; ++part) {
    const bool is_q = part == 0;
    float4 x[kPieceRows];
    if (part >= 0) {
      rows.convolve(c, warp * kPieceRows, taps + part * kTaps * kDeltaDim + channel);
#pragma unroll
      for (int r = 0; r < kPieceRows; ++r) x[r] = rows.x[r];
    }
    if (part < 1) rows.load(p.args, c, warp * kPieceRows, part_channel(p.args, group, part + 1) + channel);
    if (part >= 0)
      split_rows(x, is_q ? 1 / sqrtf(static_cast<float>(kDeltaDim)) : 1, warp * kPieceRows,
                 key_tile(s.keys, is_q), key_tile(out, is_q));
  }
}

// Convolves and writes pieces of v until none is left; for one warp. The rows of a piece are on their way
// while the piece before is written.
template <int kTaps>
__device__ __forceinline__ void convolve_values(const ChunkParams& p, const float* taps, MatricesShared& s) {
  const int channel = lane_index() * 4, group = s.work.group, num_pieces = group * kPieces;
  const ChunkRows c = s.work.rows;
  float* const staged = s.after.staged[warp_index()];
  PartRows<kTaps> rows;
#pragma unroll 1
  for (int piece = -1; piece < num_pieces;) {
    const int head = piece / kPieces, first = piece % kPieces * kPieceRows;
    if (piece >= 0) {
      rows.convolve(c, first, taps + (2 + head) * kTaps * kDeltaDim + channel);
#pragma unroll
      for (int r = 0; r < kPieceRows; ++r)
        *reinterpret_cast<float4*>(staged + r * kStagedStride + channel) = rows.x[r];
    }
    const int next = __shfl_sync(~0u, channel == 0 ? atomicAdd(&s.next_piece, 1) : 0, 0);
    if (next < num_pieces)
      rows.load(p.args, c, next % kPieces * kPieceRows,
                part_channel(p.args, group, 2 + next / kPieces) + channel);
    __syncwarp();
    if (piece >= 0) write_values(staged, first, p.values[s.work.first_head + head]);
    __syncwarp();
    piece = next;
  }
}

// Grid (chunks of the pass, Hk).
template <int kTaps>
__global__ void __launch_bounds__(kChunkThreads, 2)
    chunk_matrices_kernel(const __grid_constant__ ChunkParams p) {
  extern __shared__ uint4 shared[];
  MatricesShared& s = *reinterpret_cast<MatricesShared*>(shared);
  float* const taps = reinterpret_cast<float*>(&s + 1);
  const int group = p.args.num_value_heads / p.args.num_key_heads;
  ptx::grid_dependents_launch();
  load_taps<kTaps>(p.args, group, taps);
  wait_at_start(p);
  const int chunk = p.first_chunk + static_cast<int>(blockIdx.x);
  const ChunkedSequence sequence = find_sequence(p, chunk, 0);
  if (sequence.index < 0) {  // the whole block
    ptx::cp_async_wait<0>();
    return wait_at_end(p);
  }
  const ChunkRows c = chunk_rows(sequence, chunk);
  for (int part = 0; part < 2 + group; ++part) prefetch_rows(p, c, part_channel(p.args, group, part));
  prefetch_gates(p, c, group);
  if (threadIdx.x == 0) {
    s.work = {c, group,
              static_cast<int>(blockIdx.x) * p.args.num_value_heads + static_cast<int>(blockIdx.y) * group};
    s.next_piece = 0;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  convolve_keys<kTaps>(p, taps, s);
  __syncthreads();
  const int warp = warp_index();
  const bool is_q = warp >= kInverters;
  RowProducts products;
  products.block = is_q ? kChunkWarps - 1 - warp : warp;  // the same work for each of the SM's parts
  products.multiply(s.keys, is_q);
  // The warps of the first blocks, which multiply least, sum the gates.
  if (const int head = 2 * products.block + (is_q ? 1 : 0); head < s.work.group)
    sum_gates(p, s.work.rows, static_cast<int>(blockIdx.y) * s.work.group + head, s.gates[head],
              p.matrices[s.work.first_head + head]);
  __syncthreads();  // the keys were read, the gates are there
  if (is_q)
    write_products(p, products, s);
  else
    write_inverses(p, products, s);
  convolve_values<kTaps>(p, taps, s);
  wait_at_end(p);
}

template <int kTaps>
size_t shared_bytes(int group) {
  return sizeof(MatricesShared) + (2 + group) * sizeof(float[kTaps][kDeltaDim]);
}

template <int kTaps>
void launch_matrices(const ChunkParams& params) {
  const int group = params.args.num_value_heads / params.args.num_key_heads;
  FP4MOE_CHECK(group <= kMaxDeltaCluster, "too many value heads for a key head");
  prepare_kernel(chunk_matrices_kernel<kTaps>,
                 {.shared_bytes = static_cast<int>(shared_bytes<kTaps>(kMaxDeltaCluster))});
  launch("chunk_matrices", chunk_matrices_kernel<kTaps>,
         {.grid = dim3(static_cast<unsigned>(params.num_chunks),
                       static_cast<unsigned>(params.args.num_key_heads)),
          .block = dim3(kChunkThreads),
          .shared_bytes = shared_bytes<kTaps>(group)},
         params);
}

}  // namespace

void launch_chunk_matrices(const ChunkParams& params) {
  if (params.args.conv_width <= kFewTaps)
    launch_matrices<kFewTaps>(params);
  else
    launch_matrices<kMaxConvWidth>(params);
}

}  // namespace fp4moe::cuda
