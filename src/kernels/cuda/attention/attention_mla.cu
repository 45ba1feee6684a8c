// Multi-head latent attention: the values are the first columns of the keys, and all heads share them.
//
// Computes   out[t, h] = sum_j softmax_j(scale q[t, h] k[j], sinks[h]) k[j][: v_dim], j in row t's window.
// Shapes     q f32 [T, q_stride]; pages bf16 or E4M3 [pages, kv_heads, page_size, row]; out bf16 or f32
//            [T, heads * v_dim]. k_dim up to 576 and v_dim up to 512, multiples of 16; any number G of query
//            heads per kv head.
// Bytes      2 (bf16) or 1 (E4M3) * k_dim per kv head and key for each tile of 64 rows, from L2; once from
//            HBM.
// Flops      2 * (k_dim + v_dim) per row, head and key seen.
// Bound      With 128 heads, the tensor cores; with few heads, the gather of keys.
// Design     A cluster of S blocks serves a tile of 64 rows (tokens x G heads) of a sequence; block s takes
//            the key tiles s, s + S, ... of 64 keys each. One warp group gathers keys with 16-byte cp.async
//            into two stages. Two other warp groups each compute the logits of half of a tile's keys,
//            exchange the rows' maxima, put the weights into shared memory, and multiply all weights by half
//            of the columns of the same tile, which is read transposed. The blocks' sums are merged through
//            shared memory, in order of s. E4M3 codes are converted to bf16 on their way to shared memory,
//            after the L2 was asked for the next tile's.
// Numerics   q and the weights are rounded to bf16, sums are f32, and the softmax has base 2. E4M3 codes are
//            exact in bf16; their scale is in scale_log2 and multiplies the output's sums. A row's bits
//            depend only on its keys and on S.
#include "device/stream.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/page_codes.cuh"
#include "kernels/cuda/ptx/attention_ptx.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

constexpr int kRows = 64, kKeys = 64, kStages = 2, kMaxBlocks = 9, kMaxValueDim = 512;
constexpr int kConsumerThreads = 256, kThreads = kConsumerThreads + 128;
constexpr int kSumStride = kMaxValueDim + 8;  // four rows' columns at once are in different banks
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBlockBytes = kKeys * 128;  // per 64 columns; rows of 128 bytes in the 128-byte swizzle
constexpr int kStageBytes = kMaxBlocks * kBlockBytes;

// A row's part of the merge: the factor of each block's sums, and their denominator.
struct Shares {
  float factor[kMaxCluster][kRows], denominator[kRows];
};

struct alignas(1024) Shared {
  union {
    uint8_t keys[kStages][kStageBytes];
    float sums[kRows][kSumStride];
  };
  union {
    uint8_t q[kStageBytes];
    Shares shares;
  };
  uint8_t weights[kBlockBytes];
  float half_largest[2][kRows], half_denominator[2][kRows];
  float largest[kRows], denominator[kRows];
  uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;
static_assert(kSharedBytes <= 232448);

// Returns the byte offset of 16-byte chunk c of a row.
__device__ __forceinline__ int chunk_at(int row, int c) {
  return c / 8 * kBlockBytes + row * 128 + ((c % 8 ^ row % 8) << 4);
}

// A block's work: the sums for a tile of rows over every splits-th tile of the rows' keys.
struct Work {
  RowTile tile;
  KeyRange keys;
  int kv_head, split, splits;  // split: the block's number among the `splits` of its cluster

  __device__ __forceinline__ int first_key() const { return keys.begin + split * kKeys; }
  __device__ __forceinline__ int key_stride() const { return splits * kKeys; }
};

__device__ __forceinline__ void produce(const AttentionParams& p, const Work& work, Shared& shared) {
  const KeyRange keys = work.keys;
  const int c = threadIdx.x % 8, r0 = threadIdx.x / 8;
  const auto* pages = reinterpret_cast<const uint16_t*>(p.k);
  int stage = 0, parity = 1;
  for (int first = work.first_key(); first < keys.end; first += work.key_stride()) {
    int64_t rows[kKeys / 16];
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      rows[i] = page_row(p, work.tile.sequence, work.kv_head, keys.nearest(first + r0 + 16 * i));
    ptx::mbarrier_wait(&shared.empty[stage], parity);
    const uint32_t to = ptx::shared_address(shared.keys[stage]);
    for (int block = 0; block * 64 + c * 8 < p.k_dim; ++block)
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i)
        ptx::cp_async16(to + chunk_at(r0 + 16 * i, block * 8 + c),
                        pages + rows[i] * p.k_stride + block * 64 + c * 8,
                        keys.has(first + r0 + 16 * i) ? 16 : 0);
    ptx::cp_async_arrive(&shared.full[stage]);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

// The same for pages of E4M3 codes: two blocks of 64 columns at a time.
__device__ __forceinline__ void produce_from_codes(const AttentionParams& p, const Work& work,
                                                   Shared& shared) {
  constexpr int kRowsEach = kKeys / 16;
  const KeyRange keys = work.keys;
  const int c = threadIdx.x % 8, r0 = threadIdx.x / 8;
  const auto row_of = [&](int first, int i) {
    return page_row(p, work.tile.sequence, work.kv_head, keys.nearest(first + r0 + 16 * i));
  };
  const auto codes_at = [&](int row, int column) { return p.k + int64_t{row} * p.k_stride + column; };
  int stage = 0, parity = 1;
  for (int first = work.first_key(); first < keys.end; first += work.key_stride()) {
    int rows[kRowsEach];
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      rows[i] = row_of(first, i);
      if (first + work.key_stride() < keys.end && c * 128 < p.k_dim)
        ptx::prefetch_l2(codes_at(row_of(first + work.key_stride(), i), c * 128));
    }
    ptx::mbarrier_wait(&shared.empty[stage], parity);
    const uint32_t to = ptx::shared_address(shared.keys[stage]);
    for (int block = 0; block * 64 < p.k_dim; block += 2) {
      uint2 codes[2][kRowsEach];
#pragma unroll
      for (int j = 0; j < 2 * kRowsEach; ++j) {
        const int column = (block + j / kRowsEach) * 64 + c * 8, i = j % kRowsEach;
        codes[j / kRowsEach][i] = {0, 0};
        if (column < p.k_dim && keys.has(first + r0 + 16 * i))
          codes[j / kRowsEach][i] = load_codes(codes_at(rows[i], column));
      }
#pragma unroll
      for (int j = 0; j < 2 * kRowsEach; ++j) {
        const int chunk = (block + j / kRowsEach) * 8 + c, i = j % kRowsEach;
        if (chunk * 8 < p.k_dim)
          ptx::store_shared16(to + chunk_at(r0 + 16 * i, chunk), bf16_of_codes(codes[j / kRowsEach][i]));
      }
    }
    ptx::fence_proxy_async_all();
    ptx::mbarrier_arrive(&shared.full[stage]);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}

// Loads the tile's queries as bf16, with zeros past the tile's rows. A warp takes every eighth row, and
// requests four rows before it stores them.
__device__ __forceinline__ void load_queries(const AttentionParams& p, const RowTile& tile, int kv_head,
                                             int thread, Shared& shared) {
  constexpr int kWarps = kConsumerThreads / 32, kAhead = 4;
  const int lane = thread % 32;
#pragma unroll 1
  for (int first = thread / 32; first < kRows; first += kAhead * kWarps) {
    float2 q[kAhead][kMaxBlocks];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int row = tile.first + first + i * kWarps;
      const float* from = p.q + (tile.first_row + row / p.group) * p.q_stride +
                          static_cast<int64_t>(kv_head * p.group + row % p.group) * p.k_dim + 2 * lane;
#pragma unroll
      for (int block = 0; block < kMaxBlocks; ++block) {
        q[i][block] = {0, 0};
        if (row < tile.num_tokens * p.group && 64 * block + 2 * lane < p.k_dim)
          q[i][block] = *reinterpret_cast<const float2*>(from + 64 * block);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int block = 0; block < kMaxBlocks; ++block)
        *reinterpret_cast<uint32_t*>(shared.q + chunk_at(first + i * kWarps, block * 8 + lane / 4) +
                                     lane % 4 * 4) = ptx::bf16_pair(q[i][block].x, q[i][block].y);
  }
}

// A consumer thread's state: rows g and g + 8 of its warp's 16 rows; (g, q) = (lane / 4, lane % 4).
struct Rows {
  float out[2][64];  // columns 256 half + 128 part + 8 n + 2 q + i of row g + 8 r at [part][4 n + 2 r + i]
  float largest[2], denominator[2];
  int position[2], row[2];  // position -1: not a row; row: index in the tile
};

// kSteps: number of steps of 16 columns; 0: k_dim / 16 steps.
template <int kSteps>
__device__ __forceinline__ void multiply_keys(int k_dim, uint32_t q, uint32_t keys, float (&s)[16]) {
  const uint64_t a = wgmma_b_descriptor(q, 0), b = wgmma_b_descriptor(keys, 0);
#pragma unroll
  for (float& x : s) x = 0;
  keep_registers(s);
  wgmma_fence();
  const auto multiply = [&](int step) {
    const int at = (step / 4 * kBlockBytes + step % 4 * 32) / 16;
    wgmma<0>(s, a + at, b + at, true);
  };
  if constexpr (kSteps > 0) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) multiply(step);
  } else {
#pragma unroll 1
    for (int step = 0; step < k_dim / 16; ++step) multiply(step);
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep_registers(s);
}

// Turns the logits of this half's 32 keys into weights in shared memory; the halves exchange each row's
// largest logit.
__device__ __forceinline__ void weigh(const AttentionParams& p, int half, int first_key, Rows& r,
                                      float (&s)[16], Shared& shared) {
  const int q2 = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int last = r.position[i] - first_key - q2, begin = p.window > 0 ? last - p.window + 1 : INT32_MIN;
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[4 * n + 2 * i + j];
        if (8 * n + j > last || 8 * n + j < begin) x = -INFINITY;
        most = fmaxf(most, x);
      }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (q2 == 0) shared.half_largest[half][r.row[i]] = most;
  }
  ptx::named_barrier(1, kConsumerThreads);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = r.row[i];
    const float most = fmaxf(r.largest[i], fmaxf(shared.half_largest[0][row], shared.half_largest[1][row]));
    const float base = most == -INFINITY ? 0 : most;  // no key of the row yet: all weights are 0
    const float origin = base * p.scale_log2;
    const float rescale = ex2((r.largest[i] - base) * p.scale_log2);  // exactly 1 if no logit is larger
    r.largest[i] = most;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float x = ex2(fmaf(s[4 * n + 2 * i], p.scale_log2, -origin));
      const float y = ex2(fmaf(s[4 * n + 2 * i + 1], p.scale_log2, -origin));
      sum += x + y;
      *reinterpret_cast<uint32_t*>(shared.weights + chunk_at(row, 4 * half + n) + q2 * 2) =
          ptx::bf16_pair(x, y);
    }
    r.denominator[i] = r.denominator[i] * rescale + sum;
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int n = 0; n < 16; ++n)
        r.out[part][4 * n + 2 * i] *= rescale, r.out[part][4 * n + 2 * i + 1] *= rescale;
  }
  ptx::fence_proxy_async_all();
  ptx::named_barrier(2, kConsumerThreads);
}

__device__ __forceinline__ void multiply_values(int half, uint32_t weights, uint32_t keys, Rows& r) {
  const uint64_t a = wgmma_b_descriptor(weights, 0);
  const uint64_t b = wgmma_b_descriptor(keys + half * 4 * kBlockBytes, kBlockBytes);
  keep_registers(r.out[0]), keep_registers(r.out[1]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int part = 0; part < 2; ++part)
      wgmma<1>(r.out[part], a + step * 2, b + (part * 2 * kBlockBytes + step * 2048) / 16, true);
  wgmma_commit();
  wgmma_wait<0>();
  keep_registers(r.out[0]), keep_registers(r.out[1]);
}

// Stores this block's sums in shared memory.
__device__ __forceinline__ void put_sums(const AttentionParams& p, int half, Rows& r, Shared& shared) {
  ptx::named_barrier(1, kConsumerThreads);  // both groups have read the keys, whose memory the sums reuse
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = r.row[i];
    float denominator = r.denominator[i];
    denominator += __shfl_xor_sync(~0u, denominator, 1);
    denominator += __shfl_xor_sync(~0u, denominator, 2);
    if (q == 0) shared.half_denominator[half][row] = denominator;
    if (q == 0 && half == 0) shared.largest[row] = r.largest[i];
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const int d = half * 256 + 8 * n + 2 * q, at = n % 16 * 4 + 2 * i;
      *reinterpret_cast<float2*>(&shared.sums[row][d]) = {r.out[n / 16][at], r.out[n / 16][at + 1]};
    }
  }
  ptx::named_barrier(2, kConsumerThreads);
  const int row = static_cast<int>(threadIdx.x) - 128;
  if (row < kRows)
    shared.denominator[row] = shared.half_denominator[0][row] + shared.half_denominator[1][row];
}

template <int kSteps>
__device__ __forceinline__ void consume(const AttentionParams& p, const Work& work, Shared& shared) {
  const RowTile& tile = work.tile;
  const int thread = static_cast<int>(threadIdx.x) - 128, half = thread / 128;
  Rows r;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    r.row[i] = thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * i;
    const int row = tile.first + r.row[i];
    r.position[i] = row < tile.num_tokens * p.group ? tile.first_position + row / p.group : -1;
    r.largest[i] = -INFINITY, r.denominator[i] = 0;
#pragma unroll
    for (float& x : r.out[i]) x = 0;
  }
  load_queries(p, tile, work.kv_head, thread, shared);
  ptx::fence_proxy_async_all();
  ptx::named_barrier(1, kConsumerThreads);
  int stage = 0, parity = 0;
  for (int first = work.first_key(); first < work.keys.end; first += work.key_stride()) {
    float s[16];
    const uint32_t tile_keys = ptx::shared_address(shared.keys[stage]);
    ptx::mbarrier_wait(&shared.full[stage], parity);
    ptx::fence_proxy_async_all();
    multiply_keys<kSteps>(p.k_dim, ptx::shared_address(shared.q), tile_keys + half * 32 * 128, s);
    weigh(p, half, first + half * 32, r, s, shared);
    multiply_values(half, ptx::shared_address(shared.weights), tile_keys, r);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  put_sums(p, half, r, shared);
}

// Computes what a row's sums in each block of the cluster count for, and their denominator.
__device__ __forceinline__ void weigh_blocks(const AttentionParams& p, const Work& work, int row, int head,
                                             Shared& shared) {
  const uint32_t own_largest = ptx::shared_address(&shared.largest[row]),
                 own_denominator = ptx::shared_address(&shared.denominator[row]);
  const float sink = p.sinks != nullptr ? p.sinks[head] * kLog2e : -INFINITY;
  float most[kMaxCluster], share[kMaxCluster], largest = sink;
#pragma unroll
  for (int j = 0; j < kMaxCluster; ++j) {
    most[j] = -INFINITY, share[j] = 0;
    if (j < work.splits) most[j] = ptx::ld_cluster(ptx::map_cluster(own_largest, j)) * p.scale_log2;
    if (j < work.splits) share[j] = ptx::ld_cluster(ptx::map_cluster(own_denominator, j));
  }
#pragma unroll
  for (const float x : most) largest = fmaxf(largest, x);
  float denominator = p.sinks != nullptr ? ex2(sink - largest) : 0;
#pragma unroll
  for (int j = 0; j < kMaxCluster; ++j) {
    const float factor = share[j] == 0 ? 0 : ex2(most[j] - largest);  // 0: no key, and sums of 0
    denominator += factor * share[j];
    shared.shares.factor[j][row] = factor;
  }
  shared.shares.denominator[row] = denominator;
}

// Stores 4 columns of a row of the output, beginning at `at`.
__device__ __forceinline__ void put_output(const AttentionParams& p, int64_t at, float4 sum,
                                           float denominator) {
  sum.x = sum.x * p.v_scale / denominator, sum.y = sum.y * p.v_scale / denominator;
  sum.z = sum.z * p.v_scale / denominator, sum.w = sum.w * p.v_scale / denominator;
  if (p.out_f32)
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = sum;
  else
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + at) = {ptx::bf16_pair(sum.x, sum.y),
                                                                          ptx::bf16_pair(sum.z, sum.w)};
}

// Computes this block's share of the tile's outputs from the sums of all blocks of the cluster. A thread has
// 4 columns of every (2 splits)-th row, and requests two rows from four blocks before it adds them.
__device__ __forceinline__ void merge_cluster(const AttentionParams& p, const Work& work, Shared& shared) {
  constexpr int kRowsAtOnce = 2, kBlocksAtOnce = 4;
  const RowTile& tile = work.tile;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  const int rows = min(kRows, tile.num_tokens * p.group - tile.first);
  const auto head_of = [&](int row) { return work.kv_head * p.group + (tile.first + row) % p.group; };
  if (thread < rows) weigh_blocks(p, work, thread, head_of(thread), shared);
  ptx::named_barrier(1, kConsumerThreads);
  const int d = thread % 128 * 4, stride = work.splits * 2;
  if (d >= p.v_dim) return;
  for (int first = work.split * 2 + thread / 128; first < rows; first += kRowsAtOnce * stride) {
    float4 sum[kRowsAtOnce] = {};
#pragma unroll 1
    for (int block = 0; block < work.splits; block += kBlocksAtOnce) {
      float4 x[kRowsAtOnce][kBlocksAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < kBlocksAtOnce; ++j)
          if (first + i * stride < rows && block + j < work.splits)
            x[i][j] = ptx::ld_cluster4(
                ptx::map_cluster(ptx::shared_address(&shared.sums[first + i * stride][d]), block + j));
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < kBlocksAtOnce; ++j) {
          const float factor = shared.shares.factor[block + j][min(first + i * stride, kRows - 1)];
          if (factor == 0) continue;
          sum[i].x += factor * x[i][j].x, sum[i].y += factor * x[i][j].y;
          sum[i].z += factor * x[i][j].z, sum[i].w += factor * x[i][j].w;
        }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (const int row = first + i * stride; row < rows)
        put_output(p,
                   (tile.first_row + (tile.first + row) / p.group) * p.out_cols +
                       static_cast<int64_t>(head_of(row)) * p.v_dim + d,
                   sum[i], shared.shares.denominator[row]);
  }
}

template <int kSteps, bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) attention_mla(const __grid_constant__ AttentionParams p) {
  extern __shared__ uint8_t memory[];
  const uint32_t misaligned = ptx::shared_address(memory) % 1024;  // the same in all blocks of a cluster
  Shared& shared = *reinterpret_cast<Shared*>(memory + (misaligned != 0 ? 1024 - misaligned : 0));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 128);
      ptx::mbarrier_init(&shared.empty[i], kConsumerThreads / 32);
    }
    ptx::mbarrier_init_fence();
  }
  const int splits = static_cast<int>(ptx::cluster_nctas()), split = static_cast<int>(ptx::cluster_ctarank());
  const int kv_head = blockIdx.y;
  // Before the wait: no kernel writes the batch's rows (DeviceBatch).
  const RowTile tile = find_row_tile(p, kRows, static_cast<int>(blockIdx.x) / splits);
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (kv_head == 0) clear_padding_rows(p, blockIdx.x, gridDim.x);
  if (tile.sequence < 0) return;
  const Work work{tile, keys_of_tile(p, tile, kRows, kKeys), kv_head, split, splits};
  if (threadIdx.x < 128) {
    ptx::lower_registers<kProducerRegisters>();
    if constexpr (kFp8)
      produce_from_codes(p, work, shared);
    else
      produce(p, work, shared);
    ptx::cluster_sync();
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    consume<kSteps>(p, work, shared);
    ptx::cluster_sync();
    merge_cluster(p, work, shared);
  }
  ptx::cluster_sync();  // the other blocks have read this block's sums
}

template <int kSteps, bool kFp8>
void launch_pages(const AttentionParams& p, int splits) {
  prepare_kernel(attention_mla<kSteps, kFp8>, {.shared_bytes = kSharedBytes, .has_large_clusters = true});
  const dim3 grid(static_cast<unsigned>(max_row_tiles(p, kRows) * splits),
                  static_cast<unsigned>(p.num_kv_heads));
  fp4moe::launch("attention_mla", attention_mla<kSteps, kFp8>,
                 {grid, dim3(kThreads), kSharedBytes, static_cast<unsigned>(splits)}, p);
}

template <int kSteps>
void launch(const AttentionParams& p, int splits) {
  p.is_fp8 ? launch_pages<kSteps, true>(p, splits) : launch_pages<kSteps, false>(p, splits);
}

}  // namespace

void launch_attention_mla(const AttentionParams& p, int splits) {
  if (p.k_dim == 576)
    launch<576 / 16>(p, splits);
  else
    launch<0>(p, splits);
}

}  // namespace fp4moe::cuda
