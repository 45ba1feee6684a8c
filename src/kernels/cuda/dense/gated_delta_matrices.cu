// gated_delta in chunks, first kernel: what a chunk's rows alone determine.
//
// Computes:  per chunk and key head the convolved and normed k and q, and per value head the convolved v, T
//            and P of gated_delta_chunks.cuh. With A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i, the
//            changes of the state are N = (I + A)^-1 diag(beta) (V - exp(G) K S).
// Shapes:    chunks of 64 rows; dk = dv = 128; a block per chunk and key head.
// Bytes:     4 (2 Hk dk + Hv dv) read per row, and 1024 Hk + 1032 Hv written.
// Flops:     2 * 64 (2 Hk dk + Hv 64 / 3) per row, times 3 for the products of k and q.
// Bound:     HBM.
// Numerics:  products of bf16 pairs high + low with f32 sums, about 2^-16; the inverse in f32, sums of g
//            in f64, because exp(G_i - G_j) near 1 may have a large G. No exponent is positive.
#include "kernels/cuda/dense/gated_delta_chunks.cuh"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStagedStride = kDeltaDim + 4;    // floats of a row; pads against bank conflicts
constexpr int kSquareStride = kDeltaChunk + 4;  // floats of a row of A and of the inverse
constexpr int kRowsPerThread = kDeltaChunk * kDeltaDim / kThreads;  // of one channel
constexpr float kMinLogDecay = -1000;                               // exp() of it is 0

struct MatricesShared {
  union {
    DeltaKeys keys;
    struct {
      float k_k[kDeltaChunk * kSquareStride], q_k[kDeltaChunk * kSquareStride];
    } products;
  };
  union {
    float rows[kDeltaChunk * kStagedStride];  // q, k or v
    struct {
      float a[kDeltaChunk * kSquareStride], inverse[kDeltaChunk * kSquareStride];
    } squares;
  } staged;
  double sums[kDeltaChunk];  // G
  float beta[kDeltaChunk];
};

__device__ float logistic(float x) { return 1 / (1 + expf(-x)); }

// Convolves a head's rows of one part of the channels, `channel` and the next kDeltaDim - 1, into
// staged.rows.
__device__ void convolve_rows(const ChunkParams& p, const ChunkRows& c, int64_t first_channel, float* rows) {
  constexpr int kAtOnce = 8, kBefore = kMaxConvWidth - 1;
  const int column = static_cast<int>(threadIdx.x) % kDeltaDim;
  const int first = static_cast<int>(threadIdx.x) / kDeltaDim * kRowsPerThread, width = p.args.conv_width;
  const int64_t channel = first_channel + column;
  float taps[kMaxConvWidth], x[kBefore + kAtOnce];  // the last `width` taps; the others are 0
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i) {
    const int tap = i - kMaxConvWidth + width;
    taps[i] = tap >= 0 ? __ldg(p.args.conv_weight + channel * width + tap) : 0;
  }
#pragma unroll
  for (int i = 0; i < kBefore; ++i)
    x[i] = kBefore - i < width ? chunk_input(p.args, c, c.offset + first - kBefore + i, channel) : 0;
#pragma unroll 1
  for (int row = first; row < first + kRowsPerThread; row += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[kBefore + i] = chunk_input(p.args, c, c.offset + row + i, channel);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float sum = 0;
#pragma unroll
      for (int tap = 0; tap < kMaxConvWidth; ++tap) sum = fmaf(taps[tap], x[i + tap], sum);
      rows[(row + i) * kStagedStride + column] = c.has(row + i) ? sum * logistic(sum) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) x[i] = x[kAtOnce + i];
  }
}

// Fetches the rows of a head's channels into the L2.
__device__ void prefetch_rows(const ChunkParams& p, const ChunkRows& c, int64_t first_channel) {
  constexpr int kLineFloats = 32, kLines = kDeltaDim / kLineFloats;
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaChunk * kLines; i += kThreads)
    if (c.has(i / kLines))
      ptx::prefetch_l2(p.args.qkv + c.batch_row(i / kLines) * p.args.qkv_stride + first_channel +
                       i % kLines * kLineFloats);
}

// Scales the staged rows to the norm and splits them.
__device__ void split_rows(const float* rows, float norm, uint8_t* high, uint8_t* low) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kDeltaChunk; row += kWarps) {
    const float4 x = *reinterpret_cast<const float4*>(rows + row * kStagedStride + lane * 4);
    const float scale = norm / sqrtf(warp_sum(sum_of_squares(0, x)) + kDeltaNormEps);
    const ptx::SplitPair first = ptx::split_pair(x.x * scale, x.y * scale),
                         second = ptx::split_pair(x.z * scale, x.w * scale);
    const int at = key_offset(row, lane * 4);
    *reinterpret_cast<uint2*>(high + at) = {first.high, second.high};
    *reinterpret_cast<uint2*>(low + at) = {first.low, second.low};
  }
}

// The A fragment of 16 columns (mma_bf16), split.
struct SplitFragment {
  uint32_t high[4], low[4];
};
// k or q in shared memory.
struct SplitTile {
  uint32_t high, low;  // shared addresses
};

// c[8 tiles] += a * b of one k step, for the pairs of n tiles [from, 4); b: [n, k]. The three products of a
// tile are apart, because each waits for the one before.
__device__ __forceinline__ void add_products(float (&c)[8][4], const SplitFragment& a, const SplitTile& b,
                                             int step, int from) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t high[4][4], low[4][4];  // {n tile 2 m: k 0 ... 7, 8 ... 15; n tile 2 m + 1: likewise}
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    if (m < from) continue;
    const int at = key_offset(m * 16 + lane % 8 + lane / 16 * 8, step * 16 + lane / 8 % 2 * 8);
    ptx::load_matrices(high[m], b.high + at);
    ptx::load_matrices(low[m], b.low + at);
  }
#pragma unroll
  for (int term = 0; term < 3; ++term)
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n / 2 < from) continue;
      const uint32_t* const of_b = term == 1 ? low[n / 2] : high[n / 2];
      ptx::mma_bf16(c[n], term == 0 ? a.low : a.high, of_b[n % 2 * 2], of_b[n % 2 * 2 + 1]);
    }
}

// Replaces the keys by the products of the rows of k (by the first four warps) and of q with the k of 16
// earlier rows for each warp.
__device__ void multiply_rows(MatricesShared& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const bool is_q = warp >= kWarps / 2;
  const int block = is_q ? kWarps - 1 - warp : warp;  // the same work for each of the SM's parts
  const uint32_t high = ptx::shared_address(s.keys.k_high), low = ptx::shared_address(s.keys.k_low);
  const SplitTile rows = {ptx::shared_address(is_q ? s.keys.q_high : s.keys.k_high),
                          ptx::shared_address(is_q ? s.keys.q_low : s.keys.k_low)};
  float c[8][4] = {};  // [earlier row, row]
#pragma unroll 2
  for (int step = 0; step < kDeltaDim / 16; ++step) {
    const int at = key_offset(block * 16 + lane % 16, step * 16 + lane / 16 * 8);
    SplitFragment a;
    ptx::load_matrices(a.high, high + at);
    ptx::load_matrices(a.low, low + at);
    add_products(c, a, rows, step, block);
  }
  __syncthreads();  // the keys were read
  float* const to =
      (is_q ? s.products.q_k : s.products.k_k) + lane % 4 * 2 * kSquareStride + block * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(n * 8 + i % 2) * kSquareStride + i / 2 * 8] = c[n][i];
}

// Sets the sums of g and beta, and writes their factors; for one warp.
__device__ void sum_gates(const ChunkParams& p, const ChunkRows& c, int head, MatricesShared& s,
                          DeltaMatrices& out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
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
    s.beta[row] = c.has(row) ? logistic(__ldcg(p.args.b + at)) : 0;
  }
  double end = g[0] + g[1];  // the sum up to this lane
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(~0u, end, offset);
    if (lane >= offset) end += other;
  }
  const double last = __shfl_sync(~0u, end, 31), sums[2] = {end - g[1], end};
  for (int i = 0; i < 2; ++i) {
    s.sums[2 * lane + i] = sums[i];
    out.from_start[2 * lane + i] = expf(static_cast<float>(sums[i]));
    out.to_end[2 * lane + i] = expf(static_cast<float>(last - sums[i]));
  }
}

// f(row, column) for the pairs of columns {column, column + 1} of the 16 x 16 blocks up to the diagonal.
template <class F>
__device__ void each_pair(const F& f) {
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaChunk * kDeltaChunk / 2; i += kThreads) {
    const int row = i / (kDeltaChunk / 2), column = i % (kDeltaChunk / 2) * 2;
    if (column / 16 <= row / 16) f(row, column);
  }
}

__device__ void write_pair(uint8_t* high, uint8_t* low, int row, int column, float x, float y) {
  const ptx::SplitPair pair = ptx::split_pair(x, y);
  const int at = swizzled(row, column, kDeltaChunk * 2);
  *reinterpret_cast<uint32_t*>(high + at) = pair.high;
  *reinterpret_cast<uint32_t*>(low + at) = pair.low;
}

// Applies the gates to the products: sets A, and writes P.
__device__ void gate_products(MatricesShared& s, DeltaMatrices& out) {
  each_pair([&](int row, int column) {
    const int at = row * kSquareStride + column;
    float decay[2];
    for (int i = 0; i < 2; ++i)
      decay[i] = column + i <= row ? expf(static_cast<float>(s.sums[row] - s.sums[column + i])) : 0;
    for (int i = 0; i < 2; ++i) s.staged.squares.a[at + i] = s.beta[row] * s.products.k_k[at + i] * decay[i];
    write_pair(out.p_high, out.p_low, row, column, s.products.q_k[at] * decay[0],
               s.products.q_k[at + 1] * decay[1]);
  });
}

// Inverts the 16 x 16 blocks on the diagonal of I + A; a thread has a column.
__device__ void invert_blocks(const float* a, float* inverse) {
  if (threadIdx.x >= kDeltaChunk) return;
  const int column = static_cast<int>(threadIdx.x), first = column / 16 * 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = first + i == column ? 1 : 0;
#pragma unroll
    for (int k = 0; k < i; ++k) sum = fmaf(-a[(first + i) * kSquareStride + first + k], x[k], sum);
    x[i] = sum;
    inverse[(first + i) * kSquareStride + column] = sum;
  }
}

// c[i] = the sum over k of x[row i][k] y[k], for kSize columns k, the rows being kWarps apart. Elements of x
// past the diagonal count as 0 if is_lower.
template <int kSize>
__device__ __forceinline__ void multiply_column(float (&c)[kSize / kWarps], const float* x,
                                                const float (&y)[kSize], bool is_lower) {
  const int first = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kSize / kWarps; ++i) {
    const int row = first + i * kWarps;
    c[i] = 0;
#pragma unroll
    for (int k = 0; k < kSize; k += 4) {
      const float4 v = *reinterpret_cast<const float4*>(x + row * kSquareStride + k);
      const float of_x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) c[i] = fmaf(is_lower && k + j > row ? 0 : of_x[j], y[k + j], c[i]);
    }
  }
}

// Joins the inverses T1 and T2 of two blocks of kSize rows, with A21 below the first: -T2 A21 T1. The product
// A21 T1 is kept above T2. A thread has one column and every kWarps-th row.
template <int kSize>
__device__ void join_blocks(const float* a, float* inverse) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32;
  const int first = lane / kSize * 2 * kSize, column = lane % kSize;
  float* const top = inverse + first * kSquareStride + first;  // T1; [2 kSize, 2 kSize] with the others
  float* const bottom = top + kSize * kSquareStride;
  float y[kSize], c[kSize / kWarps];
#pragma unroll
  for (int k = 0; k < kSize; ++k) y[k] = k >= column ? top[k * kSquareStride + column] : 0;
  multiply_column<kSize>(c, a + (first + kSize) * kSquareStride + first, y, false);
#pragma unroll
  for (int i = 0; i < kSize / kWarps; ++i) top[(row + i * kWarps) * kSquareStride + kSize + column] = c[i];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kSize; ++k) y[k] = top[k * kSquareStride + kSize + column];
  multiply_column<kSize>(c, bottom + kSize, y, true);
#pragma unroll
  for (int i = 0; i < kSize / kWarps; ++i) bottom[(row + i * kWarps) * kSquareStride + column] = -c[i];
  __syncthreads();
}

// Writes the inverse with its columns times beta.
__device__ void write_inverse(const MatricesShared& s, DeltaMatrices& out) {
  each_pair([&](int row, int column) {
    const float* const x = s.staged.squares.inverse + row * kSquareStride + column;
    write_pair(out.t_high, out.t_low, row, column, column <= row ? x[0] * s.beta[column] : 0,
               column < row ? x[1] * s.beta[column + 1] : 0);
  });
}

__device__ void write_values(const float* rows, DeltaValues& out) {
  float4* const to = &out.of[0][0][0];
  for (int i = static_cast<int>(threadIdx.x); i < kDeltaTiles * kDeltaChunk / 8 * 32; i += kThreads) {
    const int lane = i % 32, row = i / 32 % (kDeltaChunk / 8) * 8 + lane % 4 * 2;
    const float* const v = rows + row * kStagedStride + i / (kDeltaChunk * 4) * kDeltaTileCols + lane / 4;
    to[i] = {v[0], v[kStagedStride], v[8], v[kStagedStride + 8]};
  }
}

// The matrices and v of one value head.
__device__ void write_head(const ChunkParams& p, const ChunkRows& c, int head, MatricesShared& s) {
  const int64_t at = int64_t{blockIdx.x} * p.args.num_value_heads + head;
  DeltaMatrices& out = p.matrices[at];
  __syncthreads();  // the staged rows were read, the products are there
  if (threadIdx.x < 32) sum_gates(p, c, head, s, out);
  __syncthreads();
  gate_products(s, out);
  __syncthreads();
  invert_blocks(s.staged.squares.a, s.staged.squares.inverse);
  __syncthreads();
  join_blocks<16>(s.staged.squares.a, s.staged.squares.inverse);
  join_blocks<32>(s.staged.squares.a, s.staged.squares.inverse);
  write_inverse(s, out);
  __syncthreads();
  const int64_t keys = int64_t{p.args.num_key_heads} * kDeltaDim;
  convolve_rows(p, c, 2 * keys + int64_t{head} * kDeltaDim, s.staged.rows);
  __syncthreads();
  write_values(s.staged.rows, p.values[at]);
}

// Grid (chunks of the pass, Hk).
__global__ void __launch_bounds__(kThreads, 2) chunk_matrices_kernel(const __grid_constant__ ChunkParams p) {
  extern __shared__ uint4 shared[];
  MatricesShared& s = *reinterpret_cast<MatricesShared*>(shared);
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  const int chunk = p.first_chunk + static_cast<int>(blockIdx.x), key_head = static_cast<int>(blockIdx.y);
  const ChunkedSequence sequence = find_sequence(p, chunk, 0);
  if (sequence.index < 0) return;  // the whole block
  const ChunkRows c = chunk_rows(p, sequence, chunk);
  const int64_t q_channel = int64_t{key_head} * kDeltaDim, keys = int64_t{p.args.num_key_heads} * kDeltaDim;
  const int group = p.args.num_value_heads / p.args.num_key_heads;
  prefetch_rows(p, c, keys + q_channel);
  for (int i = 0; i < group; ++i) prefetch_rows(p, c, 2 * keys + int64_t{key_head * group + i} * kDeltaDim);
  convolve_rows(p, c, q_channel, s.staged.rows);
  __syncthreads();
  split_rows(s.staged.rows, 1 / sqrtf(static_cast<float>(kDeltaDim)), s.keys.q_high, s.keys.q_low);
  __syncthreads();
  convolve_rows(p, c, keys + q_channel, s.staged.rows);
  __syncthreads();
  split_rows(s.staged.rows, 1, s.keys.k_high, s.keys.k_low);
  __syncthreads();
  uint4* const to = reinterpret_cast<uint4*>(p.keys + int64_t{blockIdx.x} * p.args.num_key_heads + key_head);
  const uint4* const from = reinterpret_cast<const uint4*>(&s.keys);
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(DeltaKeys) / sizeof(uint4));
       i += kThreads)
    to[i] = from[i];
  multiply_rows(s);
  for (int i = 0; i < group; ++i) write_head(p, c, key_head * group + i, s);
}

}  // namespace

void launch_chunk_matrices(const ChunkParams& params) {
  prepare_kernel(chunk_matrices_kernel, {.shared_bytes = static_cast<int>(sizeof(MatricesShared))});
  launch("chunk_matrices", chunk_matrices_kernel,
         {.grid = dim3(static_cast<unsigned>(params.num_chunks),
                       static_cast<unsigned>(params.args.num_key_heads)),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(MatricesShared)},
         params);
}

}  // namespace fp4moe::cuda
