// Attention for prefill: sequences with many new rows, or some sequences with many and some with few.
//
// Computes   out[t, h] = sum_j softmax_j(scale q[t, h] k[j], sinks[h]) v[j], j in row t's window.
// Shapes     q f32 [T, q_stride]; pages bf16 or E4M3 [pages, kv_heads, page_size, row]; out bf16 or f32
//            [T, heads * v_dim]. Head dims up to 256 (multiples of 16), padded to D = 64, 128 or 256 in
//            shared memory; any number G of query heads per kv head.
// Bytes      2 (bf16) or 1 (E4M3) * (k_dim + v_dim) per kv head and key for each tile of rows, from L2.
// Flops      4 * D per row, head and key seen.
// Bound      Tensor cores and exponentials (D = 64: the same number of cycles each); the row tile determines
//            L2's share.
// Design     A block serves one tile of rows of one sequence and kv head, tokens x G heads, so that a tile
//            spans few positions and masks cost little. One warp group gathers key tiles from the pages with
//            16-byte cp.async (zeros past the last key), and C other warp groups own 64 rows each: logits
//            with wgmma (q in registers), softmax in base 2, then the weights are the register operand of the
//            product with the values. A tile's logits are issued before the previous tile's product with the
//            values, which overlaps the softmax. Over E4M3 pages the first warp group converts codes to bf16
//            on their way to shared memory.
// Numerics   q and the weights are rounded to bf16, sums are f32. E4M3 codes are exact in bf16; the scale of
//            the keys is in scale_log2, that of the values in the factor of the outputs. A row's bits depend
//            only on its keys.
#include "device/stream.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/page_codes.cuh"
#include "kernels/cuda/ptx/attention_ptx.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe::cuda {
namespace {

template <int D>
struct Config {
  static constexpr int kConsumers = D == 64 ? 3 : 2;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = D == 256 ? 32 : D == 64 ? 64 : 128;
  static constexpr int kStages = D == 128 ? 3 : 4;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = D == 64 ? 32 : 40, kConsumerRegisters = D == 64 ? 160 : 232;
  static constexpr int kBlocks = D / 64;  // of 64 columns
};

template <int D>
struct alignas(1024) Shared {
  using C = Config<D>;
  uint16_t k[C::kStages][C::kBlocks][C::kKeys][64];  // in the 128-byte swizzle
  uint16_t v[C::kStages][C::kBlocks][C::kKeys][64];
  uint64_t k_full[C::kStages], v_full[C::kStages], empty[C::kStages];
};

// ---- the producer ----

// Keys or values of all pages.
struct PageRows {
  const uint8_t* pages;
  int stride, dim;  // elements
};

// Loads rows r0 + 16 i of the tile that starts at keys.begin, with zeros before keys.first and from keys.end
// on; of each row, column chunk c of each block of 64 columns. Arrives at `full` once they have landed.
template <int D>
__device__ __forceinline__ void load_tile(const PageRows& from, KeyRange keys,
                                          const int (&rows)[Config<D>::kKeys / 16], uint32_t to,
                                          uint64_t* full) {
  const int c = threadIdx.x % 8, r0 = threadIdx.x / 8;
  const auto* pages = reinterpret_cast<const uint16_t*>(from.pages);
  to += r0 * 128 + ((c ^ (r0 % 8)) << 4);
#pragma unroll
  for (int i = 0; i < Config<D>::kKeys / 16; ++i) {
    const uint16_t* row = pages + static_cast<int64_t>(rows[i]) * from.stride + c * 8;
    const bool valid = keys.has(keys.begin + r0 + 16 * i);
#pragma unroll
    for (int block = 0; block < Config<D>::kBlocks; ++block) {
      const bool inside = valid && block * 64 + c * 8 < from.dim;
      ptx::cp_async16(to + (block * Config<D>::kKeys + 16 * i) * 128, inside ? row + block * 64 : pages,
                      inside ? 16 : 0);
    }
  }
  ptx::cp_async_arrive(full);
}

// The same for pages of E4M3 codes.
template <int D>
__device__ __forceinline__ void convert_tile(const PageRows& from, KeyRange keys,
                                             const int (&rows)[Config<D>::kKeys / 16], uint32_t to,
                                             uint64_t* full) {
  constexpr int kRows = Config<D>::kKeys / 16;
  const int c = threadIdx.x % 8, r0 = threadIdx.x / 8;
  to += r0 * 128 + ((c ^ (r0 % 8)) << 4);
#pragma unroll
  for (int block = 0; block < Config<D>::kBlocks; ++block) {
    const int column = block * 64 + c * 8;
    uint2 codes[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      codes[i] = {0, 0};
      if (keys.has(keys.begin + r0 + 16 * i) && column < from.dim)
        codes[i] = load_codes(from.pages + static_cast<int64_t>(rows[i]) * from.stride + column);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      ptx::store_shared16(to + (block * Config<D>::kKeys + 16 * i) * 128, bf16_of_codes(codes[i]));
  }
  ptx::fence_proxy_async_all();
  ptx::mbarrier_arrive(full);
}

template <int D, bool kFp8>
__device__ __forceinline__ void produce(const AttentionParams& p, const RowTile& tile, int kv_head,
                                        KeyRange keys, Shared<D>& shared) {
  using C = Config<D>;
  const int r0 = threadIdx.x / 8;
  int rows[C::kKeys / 16];
  int stage = 0, parity = 1;
  const auto load = [&](const PageRows& from, const KeyRange& tile_keys, const void* to, uint64_t* full) {
    if constexpr (kFp8)
      convert_tile<D>(from, tile_keys, rows, ptx::shared_address(to), full);
    else
      load_tile<D>(from, tile_keys, rows, ptx::shared_address(to), full);
  };
  for (int first = keys.begin; first < keys.end; first += C::kKeys) {
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i)
      rows[i] = page_row(p, tile.sequence, kv_head, keys.nearest(first + r0 + 16 * i));
    const KeyRange tile_keys = {first, keys.end, keys.first};
    ptx::mbarrier_wait(&shared.empty[stage], parity);
    load({p.k, p.k_stride, p.k_dim}, tile_keys, shared.k[stage], &shared.k_full[stage]);
    load({p.v, p.v_stride, p.v_dim}, tile_keys, shared.v[stage], &shared.v_full[stage]);
    if (++stage == C::kStages) stage = 0, parity ^= 1;
  }
}

// ---- the consumers ----

// A thread's state: rows g and g + 8 of its warp's 16 rows; (g, q) = (lane / 4, lane % 4).
template <int D>
struct Rows {
  static constexpr int kParts = D > 128 ? D / 128 : 1;  // parts of the columns, one wgmma each
  uint32_t q[D / 16][4];
  float out[kParts][D / kParts / 2];  // columns 8 n + 2 q + i of row g + 8 r at [4 n + 2 r + i]
  float largest[2], denominator[2];
  int position[2], head[2], token[2];  // position -1: not a row
};

template <int D>
__device__ __forceinline__ void load_rows(const AttentionParams& p, const RowTile& tile, int kv_head,
                                          Rows<D>& r) {
  const int lane = threadIdx.x % 32, first = tile.first + (threadIdx.x / 32 - 4) * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + 8 * i;
    const bool valid = row < tile.num_tokens * p.group;
    r.token[i] = tile.first_row + row / p.group, r.head[i] = kv_head * p.group + row % p.group;
    r.position[i] = valid ? tile.first_position + row / p.group : -1;
    r.largest[i] = -INFINITY, r.denominator[i] = 0;
    const float* q = p.q + r.token[i] * p.q_stride + static_cast<int64_t>(r.head[i]) * p.k_dim;
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = step * 16 + half * 8 + lane % 4 * 2;
        float2 x = {0, 0};
        if (valid && d < p.k_dim) x = *reinterpret_cast<const float2*>(q + d);
        r.q[step][2 * half + i] = ptx::bf16_pair(x.x, x.y);
      }
  }
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part)
#pragma unroll
    for (float& x : r.out[part]) x = 0;
}

template <int D>
__device__ __forceinline__ void multiply_keys(const Rows<D>& r, uint32_t keys,
                                              float (&s)[Config<D>::kKeys / 2]) {
  const uint64_t matrix = wgmma_b_descriptor(keys, 0);
#pragma unroll
  for (int step = 0; step < D / 16; ++step)
    wgmma<0>(s, r.q[step], matrix + (step / 4 * Config<D>::kKeys * 128 + step % 4 * 32) / 16, step > 0);
}

template <int D>
__device__ __forceinline__ void multiply_values(const uint32_t (&weights)[Config<D>::kKeys / 16][4],
                                                uint32_t values, Rows<D>& r) {
  constexpr int kBlockBytes = Config<D>::kKeys * 128;
  const uint64_t matrix = wgmma_b_descriptor(values, kBlockBytes);
#pragma unroll
  for (int step = 0; step < Config<D>::kKeys / 16; ++step)
#pragma unroll
    for (int part = 0; part < Rows<D>::kParts; ++part)
      wgmma<1>(r.out[part], weights[step], matrix + (part * 2 * kBlockBytes + step * 2048) / 16, true);
}

// Sets the logits of keys outside a row's range to -infinity.
template <int kKeys>
__device__ __forceinline__ void mask(const AttentionParams& p, const int (&position)[2], int first_key,
                                     float (&s)[kKeys / 2]) {
  const int first = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int last = position[i] - first, begin = p.window > 0 ? last - p.window + 1 : INT32_MIN;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (8 * n + j > last || 8 * n + j < begin) s[4 * n + 2 * i + j] = -INFINITY;
  }
}

// Turns logits into weights in place. rescale: the factors for the sums so far.
template <int kKeys>
__device__ __forceinline__ void weigh(float scale_log2, float (&s)[kKeys / 2], float (&largest)[2],
                                      float (&denominator)[2], float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float part[4];  // keeps chains of dependent operations short
#pragma unroll
    for (int j = 0; j < 4; ++j) part[j] = largest[i];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) part[n % 2 * 2 + j] = fmaxf(part[n % 2 * 2 + j], s[4 * n + 2 * i + j]);
    float most = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float base = most == -INFINITY ? 0 : most;  // no key of the row yet: all weights are 0
    const float origin = base * scale_log2;
    rescale[i] = ex2((largest[i] - base) * scale_log2);  // exactly 1 if no logit is larger
    largest[i] = most;
#pragma unroll
    for (int j = 0; j < 4; ++j) part[j] = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[4 * n + 2 * i + j];
        x = ex2(fmaf(x, scale_log2, -origin));
        part[n % 2 * 2 + j] += x;
      }
    const float sum = (part[0] + part[1]) + (part[2] + part[3]);
    denominator[i] = denominator[i] * rescale[i] + sum;
  }
}

template <int kKeys>
__device__ __forceinline__ void round_weights(const float (&s)[kKeys / 2],
                                              uint32_t (&weights)[kKeys / 16][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = ptx::bf16_pair(s[2 * i], s[2 * i + 1]);
}

template <int D>
__device__ __forceinline__ void store_rows(const AttentionParams& p, Rows<D>& r) {
  constexpr int kPartCols = D / Rows<D>::kParts;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float denominator = r.denominator[i];
    denominator += __shfl_xor_sync(~0u, denominator, 1);
    denominator += __shfl_xor_sync(~0u, denominator, 2);
    if (r.position[i] < 0) continue;
    const float own = r.largest[i] * p.scale_log2;
    const float sink = p.sinks != nullptr ? p.sinks[r.head[i]] * kLog2e : -INFINITY;
    const float largest = fmaxf(own, sink), share = ex2(own - largest);
    const float factor =
        share * p.v_scale / (denominator * share + (p.sinks != nullptr ? ex2(sink - largest) : 0));
    const int64_t at = r.token[i] * p.out_cols + static_cast<int64_t>(r.head[i]) * p.v_dim;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const int d = 8 * n + threadIdx.x % 4 * 2, in_part = n % (kPartCols / 8) * 4 + 2 * i;
      if (d >= p.v_dim) continue;
      const float x = r.out[n * 8 / kPartCols][in_part] * factor,
                  y = r.out[n * 8 / kPartCols][in_part + 1] * factor;
      if (p.out_f32)
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + d) = {x, y};
      else
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + d) = ptx::bf16_pair(x, y);
    }
  }
}

// A consumer's place in the ring of stages.
struct Place {
  int stage = 0, parity = 0;
  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A tile of keys, and the tile before it, whose values are multiplied meanwhile.
struct KeyTile {
  int first_key;
  Place now, before;
};

// Processes one tile of keys: its logits, the previous tile's product with the values, then the tile's
// weights. kMasked is a template argument because a branch between a wgmma and its wait would make the
// compiler wait at the branch.
template <int D, bool kMasked>
__device__ __forceinline__ void consume_tile(const AttentionParams& p, const KeyTile& tile, Shared<D>& shared,
                                             Rows<D>& r, uint32_t (&weights)[Config<D>::kKeys / 16][4]) {
  constexpr int kKeys = Config<D>::kKeys;
  const Place now = tile.now, before = tile.before;
  float s[kKeys / 2], rescale[2];
  ptx::mbarrier_wait(&shared.k_full[now.stage], now.parity);
  ptx::mbarrier_wait(&shared.v_full[before.stage], before.parity);
  ptx::fence_proxy_async_all();
  wgmma_fence();
  multiply_keys(r, ptx::shared_address(shared.k[now.stage]), s);
  wgmma_commit();
  multiply_values(weights, ptx::shared_address(shared.v[before.stage]), r);
  wgmma_commit();
  wgmma_wait<1>();
  keep_registers(s);
  if constexpr (kMasked) mask<kKeys>(p, r.position, tile.first_key, s);
  weigh<kKeys>(p.scale_log2, s, r.largest, r.denominator, rescale);
  compute_before(r.denominator[0] + r.denominator[1], ptx::shared_address(&shared.k_full[0]));
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[before.stage]);
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part) {
    keep_registers(r.out[part]);
#pragma unroll
    for (int i = 0; i < D / Rows<D>::kParts / 2; ++i) r.out[part][i] *= rescale[i / 2 % 2];
  }
  round_weights<kKeys>(s, weights);
}

template <int D>
__device__ __forceinline__ void consume(const AttentionParams& p, const RowTile& tile, int kv_head,
                                        KeyRange keys, Shared<D>& shared) {
  using C = Config<D>;
  Rows<D> r;
  load_rows(p, tile, kv_head, r);
  // Keys up to the first row's own position are seen by all rows, except keys before the last row's window.
  const int seen_end = tile.first_position + tile.first / p.group + 1;
  const int seen_begin = p.window > 0 ? keys.end - p.window : 0;
  uint32_t weights[C::kKeys / 16][4];
  Place now, before;
  {
    float s[C::kKeys / 2], rescale[2];
    ptx::mbarrier_wait(&shared.k_full[0], 0);
    ptx::fence_proxy_async_all();
    wgmma_fence();
    multiply_keys(r, ptx::shared_address(shared.k[0]), s);
    wgmma_commit();
    wgmma_wait<0>();
    keep_registers(s);
    mask<C::kKeys>(p, r.position, keys.begin, s);
    weigh<C::kKeys>(p.scale_log2, s, r.largest, r.denominator, rescale);
    round_weights<C::kKeys>(s, weights);
  }
  for (int first = keys.begin + C::kKeys; first < keys.end; first += C::kKeys) {
    before = now;
    now.advance<C::kStages>();
    if (first >= seen_begin && first + C::kKeys <= seen_end)
      consume_tile<D, false>(p, {first, now, before}, shared, r, weights);
    else
      consume_tile<D, true>(p, {first, now, before}, shared, r, weights);
  }
  ptx::mbarrier_wait(&shared.v_full[now.stage], now.parity);
  ptx::fence_proxy_async_all();
  wgmma_fence();
  multiply_values(weights, ptx::shared_address(shared.v[now.stage]), r);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part) keep_registers(r.out[part]);
  store_rows(p, r);
}

template <int D, bool kFp8>
__global__ void __launch_bounds__(Config<D>::kThreads, 1)
    attention_prefill(const __grid_constant__ AttentionParams p) {
  using C = Config<D>;
  extern __shared__ uint8_t memory[];
  Shared<D>& shared =
      *reinterpret_cast<Shared<D>*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.k_full[i], 128);
      ptx::mbarrier_init(&shared.v_full[i], 128);
      ptx::mbarrier_init(&shared.empty[i], C::kConsumers * 4);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  const int kv_head = blockIdx.x;
  if (kv_head == 0) clear_padding_rows(p, blockIdx.y, gridDim.y);
  const RowTile tile = find_row_tile(p, C::kRows, blockIdx.y);
  if (tile.sequence < 0) return;
  const KeyRange keys = keys_of_tile(p, tile, C::kRows, C::kKeys);
  if (threadIdx.x < 128) {
    ptx::lower_registers<C::kProducerRegisters>();
    produce<D, kFp8>(p, tile, kv_head, keys, shared);
  } else {
    ptx::raise_registers<C::kConsumerRegisters>();
    consume<D>(p, tile, kv_head, keys, shared);
  }
}

template <int D, bool kFp8>
void launch_pages(const AttentionParams& p) {
  constexpr int kBytes = sizeof(Shared<D>) + 1024;
  prepare_kernel(attention_prefill<D, kFp8>, {.shared_bytes = kBytes});
  const dim3 grid(static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(max_row_tiles(p, Config<D>::kRows)));
  launch_attention_kernel(attention_prefill<D, kFp8>, p, {grid, Config<D>::kThreads, kBytes, 1},
                          current_stream().handle());
  current_stream().check_launch("attention_prefill");
}

template <int D>
void launch(const AttentionParams& p) {
  p.is_fp8 ? launch_pages<D, true>(p) : launch_pages<D, false>(p);
}

}  // namespace

void launch_attention_prefill(const AttentionParams& p) {
  if (p.k_dim <= 64)
    launch<64>(p);
  else if (p.k_dim <= 128)
    launch<128>(p);
  else
    launch<256>(p);
}

}  // namespace fp4moe::cuda
