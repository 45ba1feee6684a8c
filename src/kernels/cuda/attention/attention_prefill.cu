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
//            with wgmma, softmax in base 2, then the weights are the register operand of the product with the
//            values. A tile's logits are issued before the previous tile's product with the values, which
//            overlaps the softmax. Over E4M3 pages the first warp group converts codes to bf16 on their way
//            to shared memory.
//            Queries are in registers; for D = 256, whose sums occupy 128 registers of each thread, they are
//            in shared memory. Its reads then limit the products: per group and tile, each key's and value's
//            512 bytes and each row's 512 bytes. Tiles of 80 keys keep them, with the stores of new keys and
//            values, at 95 % of 128 bytes per cycle; 64 keys would need all. The two groups take turns to
//            issue products, so that one group's softmax overlaps the other's products.
// Numerics   q and the weights are rounded to bf16, sums are f32. E4M3 codes are exact in bf16; the scale of
//            the keys is in scale_log2, that of the values in the factor of the outputs. D = 256: weights are
//            relative to a logit that is at most 8 (in base 2) below the largest (weigh()). A row's bits
//            depend only on its keys.
#include "device/stream.h"
#include "kernels/cuda/attention/attention_params.h"
#include "kernels/cuda/attention/attention_prefill_softmax.cuh"
#include "kernels/cuda/attention/page_codes.cuh"
#include "kernels/cuda/ptx/attention_ptx.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ring_place.cuh"

namespace fp4moe::cuda {
namespace {

template <int D>
struct Config {
  static constexpr int kConsumers = D == 64 ? 3 : 2;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = D == 256 ? 80 : D == 64 ? 64 : 128;
  static constexpr int kStages = D == 256 ? 2 : D == 128 ? 3 : 4;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = D == 256 ? 56 : D == 128 ? 40 : 32;
  static constexpr int kConsumerRegisters = D == 256 ? 224 : D == 128 ? 232 : 160;
  static constexpr int kBlocks = D / 64;             // of 64 columns
  static constexpr bool kSharedQueries = D == 256;   // the queries are in shared memory, not in registers
  static constexpr bool kTurns = D == 256;           // the consumers take turns to issue products
  static constexpr float kSlack = D == 256 ? 8 : 0;  // see weigh()
};

template <int D, bool kSharedQueries = Config<D>::kSharedQueries>
struct SharedQueries {};
template <int D>
struct alignas(1024) SharedQueries<D, true> {
  uint16_t q[Config<D>::kBlocks][Config<D>::kRows][64];  // in the 128-byte swizzle
};

// What a row of the tile is. position -1: not a row.
struct RowPlace {
  int position, token, head;
};

template <int D>
struct alignas(1024) Shared : SharedQueries<D> {
  using C = Config<D>;
  uint16_t k[C::kStages][C::kBlocks][C::kKeys][64];  // in the 128-byte swizzle
  uint16_t v[C::kStages][C::kBlocks][C::kKeys][64];
  uint64_t k_full[C::kStages], v_full[C::kStages], k_empty[C::kStages], v_empty[C::kStages];
  RowPlace rows[C::kRows];
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
  constexpr int kAtOnce = D == 256 ? 2 : 1;  // blocks whose codes are in registers
#pragma unroll
  for (int first = 0; first < Config<D>::kBlocks; first += kAtOnce) {
    uint2 codes[kAtOnce][kRows];
#pragma unroll
    for (int i = 0; i < kAtOnce * kRows; ++i) {
      const int column = (first + i / kRows) * 64 + c * 8, row = i % kRows;
      codes[i / kRows][row] = {0, 0};
      if (keys.has(keys.begin + r0 + 16 * row) && column < from.dim)
        codes[i / kRows][row] =
            load_codes(from.pages + static_cast<int64_t>(rows[row]) * from.stride + column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * kRows; ++i)
      ptx::store_shared16(to + ((first + i / kRows) * Config<D>::kKeys + 16 * (i % kRows)) * 128,
                          bf16_of_codes(codes[i / kRows][i % kRows]));
  }
  ptx::fence_proxy_async();
  ptx::mbarrier_arrive(full);
}

// Loads the keys of each tile before the values of the tile before it, the order of their use.
template <int D, bool kFp8>
__device__ __forceinline__ void produce(const AttentionParams& p, const RowTile& tile, int kv_head,
                                        KeyRange keys, Shared<D>& shared) {
  using C = Config<D>;
  const int r0 = threadIdx.x / 8;
  int rows[C::kKeys / 16], rows_before[C::kKeys / 16];
  const auto load = [&](const PageRows& from, int first, const int(&at)[C::kKeys / 16], const void* to,
                        uint64_t* full) {
    const KeyRange tile_keys = {first, keys.end, keys.first};
    if constexpr (kFp8)
      convert_tile<D>(from, tile_keys, at, ptx::shared_address(to), full);
    else
      load_tile<D>(from, tile_keys, at, ptx::shared_address(to), full);
  };
  RingPlace<C::kStages> now, before;
  for (int first = keys.begin; first < keys.end + C::kKeys; first += C::kKeys) {
    if (first < keys.end) {
#pragma unroll
      for (int i = 0; i < C::kKeys / 16; ++i)
        rows[i] = page_row(p, tile.sequence, kv_head, keys.nearest(first + r0 + 16 * i));
      ptx::mbarrier_wait(&shared.k_empty[now.slot], now.parity ^ 1);
      load({p.k, p.k_stride, p.k_dim}, first, rows, shared.k[now.slot], &shared.k_full[now.slot]);
    }
    if (first > keys.begin) {
      ptx::mbarrier_wait(&shared.v_empty[before.slot], before.parity ^ 1);
      load({p.v, p.v_stride, p.v_dim}, first - C::kKeys, rows_before, shared.v[before.slot],
           &shared.v_full[before.slot]);
    }
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i) rows_before[i] = rows[i];
    before = now;
    now.next();
  }
}

// ---- the consumers ----

// A thread's state: rows g and g + 8 of its warp's 16 rows; (g, q) = (lane / 4, lane % 4).
template <int D>
struct Rows {
  static constexpr int kParts = D > 128 ? D / 128 : 1;  // parts of the columns, one wgmma each
  uint32_t q[Config<D>::kSharedQueries ? 1 : D / 16][4];
  float out[kParts][D / kParts / 2];  // columns 8 n + 2 q + i of row g + 8 r at [4 n + 2 r + i]
  Sums sums;
};

// The group of 64 rows of this consumer, and the first of its two rows in the tile; read at each call, since
// the registers of a loop are few.
__device__ __forceinline__ int group_of_rows() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;
}
__device__ __forceinline__ int row_in_tile() {
  const int thread = thread_read_here();
  return (thread / 32 - 4) * 16 + thread % 32 / 4;
}

// Loads a row's pairs of columns 8 n + 2 q + (0, 1), with zeros past its end.
template <int D>
__device__ __forceinline__ void load_pairs(const AttentionParams& p, const RowPlace& place,
                                           uint32_t (&pairs)[D / 8]) {
  const float* q = p.q + place.token * p.q_stride + static_cast<int64_t>(place.head) * p.k_dim;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    const int d = 8 * n + threadIdx.x % 4 * 2;
    float2 x = {0, 0};
    if (place.position >= 0 && d < p.k_dim) x = *reinterpret_cast<const float2*>(q + d);
    pairs[n] = ptx::bf16_pair(x.x, x.y);
  }
}

// Stores pairs of a row of the tile in shared memory.
template <int D>
__device__ __forceinline__ void store_pairs(const uint32_t (&pairs)[D / 8], int row, Shared<D>& shared) {
  const uint32_t to = ptx::shared_address(shared.q[0][row]) + threadIdx.x % 4 * 4;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
    ptx::store_shared4(to + n / 8 * Config<D>::kRows * 128 + (((n ^ row) % 8) << 4), pairs[n]);
}

template <int D>
__device__ __forceinline__ void load_rows(const AttentionParams& p, const RowTile& tile, int kv_head,
                                          Shared<D>& shared, Rows<D>& r) {
  const int in_tile = row_in_tile();
  uint32_t pairs[2][D / 8];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = tile.first + in_tile + 8 * i;
    const RowPlace place = {row < tile.num_tokens * p.group ? tile.first_position + row / p.group : -1,
                            tile.first_row + row / p.group, kv_head * p.group + row % p.group};
    load_pairs<D>(p, place, pairs[i]);
    if (threadIdx.x % 4 == 0) shared.rows[in_tile + 8 * i] = place;
    r.sums.base[i] = -INFINITY, r.sums.denominator[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if constexpr (Config<D>::kSharedQueries) {
      store_pairs<D>(pairs[i], in_tile + 8 * i, shared);
    } else {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) r.q[n / 2][n % 2 * 2 + i] = pairs[i][n];
    }
  __syncwarp();
  if constexpr (Config<D>::kSharedQueries) {
    ptx::fence_proxy_async();
    ptx::named_barrier(1 + group_of_rows(), 128);
  }
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part)
#pragma unroll
    for (float& x : r.out[part]) x = 0;
}

template <int D>
__device__ __forceinline__ void multiply_keys(Shared<D>& shared, const Rows<D>& r, int stage,
                                              float (&s)[Config<D>::kKeys / 2]) {
  using C = Config<D>;
  const uint64_t keys = wgmma_b_descriptor(ptx::shared_address(shared.k[stage]), 0);
  const auto multiply = [&](const auto& queries, int step) {
    wgmma<0>(s, queries, wgmma_b_advance(keys, step / 4 * C::kKeys * 128 + step % 4 * 32), step > 0);
  };
  if constexpr (C::kSharedQueries) {
    const uint64_t queries = wgmma_b_descriptor(ptx::shared_address(shared.q[0][64 * group_of_rows()]), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      multiply(wgmma_b_advance(queries, step / 4 * C::kRows * 128 + step % 4 * 32), step);
  } else {
#pragma unroll
    for (int step = 0; step < D / 16; ++step) multiply(r.q[step], step);
  }
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
      wgmma<1>(r.out[part], weights[step], wgmma_b_advance(matrix, part * 2 * kBlockBytes + step * 2048),
               true);
}

template <int D>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const Shared<D>& shared, Rows<D>& r) {
  constexpr int kPartCols = D / Rows<D>::kParts;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float denominator = r.sums.denominator[i];
    denominator += __shfl_xor_sync(~0u, denominator, 1);
    denominator += __shfl_xor_sync(~0u, denominator, 2);
    const RowPlace place = shared.rows[row_in_tile() + 8 * i];
    if (place.position < 0) continue;
    const float own = r.sums.base[i] * p.scale_log2;
    const float sink = p.sinks != nullptr ? p.sinks[place.head] * kLog2e : -INFINITY;
    const float largest = fmaxf(own, sink), share = ex2(own - largest);
    const float factor =
        share * p.v_scale / (denominator * share + (p.sinks != nullptr ? ex2(sink - largest) : 0));
    const int64_t at = place.token * p.out_cols + static_cast<int64_t>(place.head) * p.v_dim;
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

// With turns, the products of one group run while the other computes weights. Each of the two groups waits
// for its own barrier, at which the other arrives.
constexpr int kTurnBarrier = 3;
__device__ __forceinline__ void await_turn() { ptx::named_barrier(kTurnBarrier + group_of_rows(), 256); }
__device__ __forceinline__ void pass_turn() {
  ptx::named_barrier_arrive(kTurnBarrier + (group_of_rows() ^ 1), 256);
}

// A tile of keys, and the tile before it, whose values are multiplied meanwhile.
template <int D>
struct KeyTile {
  int first_key;
  RingPlace<Config<D>::kStages> now, before;
};

// Multiplies the sums by the factors. Products are not in flight.
template <int D>
__device__ __forceinline__ void rescale_rows(const float (&factor)[2], Rows<D>& r) {
  if constexpr (Config<D>::kSlack > 0)
    if (__all_sync(~0u, factor[0] == 1 && factor[1] == 1)) return;
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part)
#pragma unroll
    for (int i = 0; i < D / Rows<D>::kParts / 2; ++i) r.out[part][i] *= factor[i / 2 % 2];
}

template <int D>
__device__ __forceinline__ void mask_tile(const AttentionParams& p, int first_key, const Shared<D>& shared,
                                          float (&s)[Config<D>::kKeys / 2]) {
  const int row = row_in_tile();
  mask<Config<D>::kKeys>(p, {shared.rows[row].position, shared.rows[row + 8].position}, first_key, s);
}

// Processes one tile of keys: its logits, the previous tile's product with the values, then the tile's
// weights. kMasked is a template argument because a branch between a wgmma and its wait would make the
// compiler wait at the branch.
template <int D, bool kMasked>
__device__ __forceinline__ void consume_tile(const AttentionParams& p, const KeyTile<D>& tile,
                                             Shared<D>& shared, Rows<D>& r,
                                             uint32_t (&weights)[Config<D>::kKeys / 16][4]) {
  using C = Config<D>;
  constexpr int kKeys = C::kKeys;
  const auto now = tile.now, before = tile.before;
  float s[kKeys / 2], rescale[2];
  ptx::mbarrier_wait(&shared.k_full[now.slot], now.parity);
  ptx::mbarrier_wait(&shared.v_full[before.slot], before.parity);
  ptx::fence_proxy_async();
  if constexpr (C::kTurns) await_turn();
  wgmma_fence();
  multiply_keys(shared, r, now.slot, s);
  wgmma_commit();
  multiply_values(weights, ptx::shared_address(shared.v[before.slot]), r);
  wgmma_commit();
  if constexpr (C::kTurns) pass_turn();
  wgmma_wait<1>();
  keep_registers(s);
  ptx::mbarrier_arrive_if(&shared.k_empty[now.slot], threadIdx.x % 32 == 0);
  if constexpr (kMasked) mask_tile<D>(p, tile.first_key, shared, s);
  weigh<kKeys, C::kSlack>(p.scale_log2, s, r.sums, rescale);
  compute_before(r.sums.denominator[0] + r.sums.denominator[1], ptx::shared_address(&shared.k_full[0]));
  wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part) keep_registers(r.out[part]);
  ptx::mbarrier_arrive_if(&shared.v_empty[before.slot], threadIdx.x % 32 == 0);
  rescale_rows(rescale, r);
  round_weights<kKeys>(s, weights);
}

// Computes the weights of the first tile of keys.
template <int D>
__device__ __forceinline__ void consume_first(const AttentionParams& p, int first_key, Shared<D>& shared,
                                              Rows<D>& r, uint32_t (&weights)[Config<D>::kKeys / 16][4]) {
  using C = Config<D>;
  float s[C::kKeys / 2], rescale[2];
  ptx::mbarrier_wait(&shared.k_full[0], 0);
  ptx::fence_proxy_async();
  wgmma_fence();
  multiply_keys(shared, r, 0, s);
  wgmma_commit();
  wgmma_wait<0>();
  keep_registers(s);
  ptx::mbarrier_arrive_if(&shared.k_empty[0], threadIdx.x % 32 == 0);
  mask_tile<D>(p, first_key, shared, s);
  weigh<C::kKeys, C::kSlack>(p.scale_log2, s, r.sums, rescale);
  round_weights<C::kKeys>(s, weights);
}

template <int D>
__device__ __forceinline__ void consume(const AttentionParams& p, const RowTile& tile, int kv_head,
                                        KeyRange keys, Shared<D>& shared) {
  using C = Config<D>;
  Rows<D> r;
  load_rows(p, tile, kv_head, shared, r);
  // Keys up to the first row's own position are seen by all rows, except keys before the last row's window.
  const int seen_end = tile.first_position + tile.first / p.group + 1;
  const int seen_begin = p.window > 0 ? keys.end - p.window : 0;
  uint32_t weights[C::kKeys / 16][4];
  if constexpr (C::kTurns)
    if (group_of_rows() == 1) pass_turn();
  consume_first(p, keys.begin, shared, r, weights);
  RingPlace<C::kStages> now, before;
  for (int first = keys.begin + C::kKeys; first < keys.end; first += C::kKeys) {
    before = now;
    now.next();
    if (first >= seen_begin && first + C::kKeys <= seen_end)
      consume_tile<D, false>(p, {first, now, before}, shared, r, weights);
    else
      consume_tile<D, true>(p, {first, now, before}, shared, r, weights);
  }
  ptx::mbarrier_wait(&shared.v_full[now.slot], now.parity);
  ptx::fence_proxy_async();
  wgmma_fence();
  multiply_values(weights, ptx::shared_address(shared.v[now.slot]), r);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < Rows<D>::kParts; ++part) keep_registers(r.out[part]);
  store_rows(p, shared, r);
  if constexpr (C::kTurns)
    if (group_of_rows() == 0) await_turn();  // the other group's last arrival, so that none is left
}

template <int D, bool kFp8>
__global__ void __launch_bounds__(Config<D>::kThreads, 1)
    attention_prefill(const __grid_constant__ AttentionParams p) {
  using C = Config<D>;
  extern __shared__ uint8_t memory[];
  // An offset to the next multiple of 1024: the compiler still knows that the address is in shared memory.
  Shared<D>& shared = *reinterpret_cast<Shared<D>*>(memory + (0u - ptx::shared_address(memory)) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.k_full[i], 128);
      ptx::mbarrier_init(&shared.v_full[i], 128);
      ptx::mbarrier_init(&shared.k_empty[i], C::kConsumers * 4);
      ptx::mbarrier_init(&shared.v_empty[i], C::kConsumers * 4);
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
  static_assert(kBytes <= 227 << 10);
  prepare_kernel(attention_prefill<D, kFp8>, {.shared_bytes = kBytes});
  const dim3 grid(static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(max_row_tiles(p, Config<D>::kRows)));
  fp4moe::launch("attention_prefill", attention_prefill<D, kFp8>, {grid, dim3(Config<D>::kThreads), kBytes},
                 p);
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
