// The work list of the expert GEMMs (sm90_expert_gemm.cu): which expert, weight rows and tokens a block takes
// next, and the ring of stages through which its warps pass weights and tokens. Device code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/experts/work_list.cuh"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/device_a2a.h"
#include "kernels/device_moe.h"

namespace fp4moe::sm90 {

enum class Epilogue : uint8_t { kGated, kRelu2, kDown };

// One GEMM: out[row, n] = epilogue(sum over k of b[row, k] * w[expert, n, k]).
struct GemmPhase {
  Epilogue epilogue = Epilogue::kDown;
  int cols = 0;       // N of out: I or H
  int row_tiles = 0;  // of the weights: tiles of 64 rows
  int k = 0;          // K
  int slabs = 0;      // ceil(row_tiles / tiles of a block's slab)
  const uint8_t* w = nullptr;
  const bf16* b = nullptr;  // [rows, K]
  bool gather = false;      // row r of b is slot_of_row[r] / topk
  bool waits = false;       // for the previous phase, expert by expert
  const float* b_row_scales = nullptr;
  const float* bias = nullptr;  // [L, cols] (gated: [L, 2, cols]) or null
  void* out = nullptr;          // [rows, cols]
  bool out_is_f32 = false;
  // w4a8: layout of each expert's matrix in FP8 tiles; b then has the f16 values of e4m3 codes.
  // quantised_out: if not null, the scales [rows] with which all of an expert's rows of out, once written,
  // are quantised in place to such values.
  int64_t matrix_bytes = 0, factors_offset = 0;
  float* quantised_out = nullptr;
};

struct GemmArgs {
  GemmPhase phases[2];
  int num_phases = 1;
  int num_experts = 0;
  int topk = 1;
  Activation activation;
  const float* scales = nullptr;  // [L, 3]
  DeviceRows rows;
  A2aSlotPlaces returns;  // kReturns: they receive the rows of kDown, as bf16, instead of `out`
};

// A block's unit of work: `count` rows beginning at first_row, times `weight_tiles` tiles of weights.
struct WorkItem {
  int phase = 0, expert = -1, first_row = 0, count = 0;  // expert -1: no more work
  int first_tile = 0, weight_tiles = 0;                  // of weights; within one slab
  int token_tiles = 0;                                   // of the expert
};

// The GEMM's class by the number of rows of an expert: few rows use mma.sync, with which warps do not wait
// for each other; many rows use wgmma, with which one dequantisation serves more tokens. kFewFp8: few rows of
// w4a8, with FP8 tiles (fp8_tile_layout.h).
enum class RowClass : uint8_t { kFew, kMany, kFewFp8 };

// A block's slab has kGroups * kGroupTiles tiles of 64 rows, kGroupTiles for each consumer warpgroup, and is
// multiplied by at most kMaxN tokens. A stage holds kChunks * 64 columns; its weights are [kChunks][kTiles]
// tiles, or [kTiles] FP8 tiles. kReturns: the kernel takes GemmArgs::returns; others do not have its code,
// which would take them 0.5 % more time.
template <Fp4Format kFormatT, RowClass kRowsT, bool kReturnsT = false>
struct GemmConfig {
  static constexpr bool kReturns = kReturnsT;
  static constexpr Fp4Format kFormat = kFormatT;
  static constexpr bool kFp8 = kRowsT == RowClass::kFewFp8, kFew = kFp8 || kRowsT == RowClass::kFew;
  static constexpr int kGroups = 4, kGroupTiles = kFew ? 2 : 1, kTiles = kGroups * kGroupTiles;
  static constexpr int kMaxN = kFew ? 32 : 96, kChunks = 2, kItems = 4;
  static constexpr int kTileBytes = static_cast<int>(kFp8 ? fp8_tile_bytes(kFormat) : tile_bytes(kFormat));
  static constexpr int kWeightBytes = kTiles * (kFp8 ? 1 : kChunks) * kTileBytes;  // of a stage
  static constexpr int kChunkBytes = kMaxN * 128;                                  // of tokens, per chunk
  static constexpr int kThreads = (kGroups + 1) * 128, kLoaderWarps = 3;
  static constexpr int kProducerRegs = 32, kConsumerRegs = 112;  // together: a launched block's registers
  static constexpr int kOutTokens = 16, kOutPitch = 68;          // of the staged sums: [tokens][pitch] f32
  static constexpr int kOutBytes = kGroups * kOutTokens * kOutPitch * 4;
  static constexpr int kStages = (220 * 1024 - kOutBytes) / (kWeightBytes + kChunks * kChunkBytes);
  static_assert(kTileGroup % kTiles == 0);  // a slab's tiles are contiguous
};

// w4a8: factors of an item's sums, loaded with the item's first stage.
template <class C>
struct ItemScales {
  alignas(16) float rows[C::kFp8 ? C::kTiles * 64 : 4];  // the weights' row factors
  float tokens[C::kFp8 ? C::kMaxN : 4];
};

template <class C>
struct GemmShared {
  alignas(1024) uint8_t tokens[C::kStages][C::kChunks * C::kChunkBytes];
  alignas(128) uint8_t weights[C::kStages][C::kWeightBytes];
  alignas(16) float out[C::kGroups][C::kOutTokens * C::kOutPitch];
  uint64_t full[C::kStages], empty[C::kStages], item_full[C::kItems], item_empty[C::kItems];
  WorkItem items[C::kItems];
  // One per item in progress: at most this many items are between the item being stored and the item being
  // loaded.
  ItemScales<C> scales[C::kFp8 ? C::kItems + 1 : 1];
  uint2 table[C::kFp8 ? 128 : 1];  // the e4m3 bytes of the eight magnitudes, for each scale index
  bool is_last[C::kGroups];        // the group wrote the last of an expert's rows
  int tile_start[1];               // [L + 1]: token tiles before each expert
};

// Makes the warp arrive at a barrier of consumers: the warp has read the data that the barrier guards.
__device__ __forceinline__ void release(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

__device__ __forceinline__ int rows_of(const DeviceRows& rows, int expert) {
  const int count = rows.counts[expert];
  return rows.capacity == 0 ? count : max(0, min(count, static_cast<int>(rows.capacity)));
}

// Counts the token tiles before each expert. Called by one warp.
__device__ inline void count_tiles(const DeviceRows& rows, int num_experts, int max_n, int* tile_start) {
  const int lane = threadIdx.x % 32, each = (num_experts + 31) / 32;
  const int first = min(num_experts, lane * each), last = min(num_experts, first + each);
  int sum = 0;
  for (int e = first; e < last; ++e) {
    const int tiles = (rows_of(rows, e) + max_n - 1) / max_n;
    tile_start[e] = tiles;
    sum += tiles;
  }
  int before = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  before -= sum;
  for (int e = first; e < last; ++e) {
    const int tiles = tile_start[e];
    tile_start[e] = before;
    before += tiles;
  }
  if (lane == 31) tile_start[num_experts] = before;
  __syncwarp();
}

// A slab, or part `index` of a slab that is cut into `count` parts.
struct SlabPart {
  int slab, index = 0, count = 1;
};

// Returns the part at `index` in the list of the last phase, which has `slabs` of all phases' `all_slabs`.
// The list ends with halves, then quarters of slabs, with which the blocks end at about the same time. A
// quarter takes almost half as long as a slab, so lists of many slabs per block have fewer parts, and lists
// whose last slabs are brief, with fewer columns than those of the first phase, more halves instead of
// quarters (measured on an H200). Returns a slab beyond the last one if there is no such part.
__device__ inline SlabPart part_of_last_phase(int slabs, int all_slabs, bool is_brief, int index) {
  const int blocks = static_cast<int>(gridDim.x);
  const bool is_short = all_slabs <= 3 * blocks;
  const int quartered = is_short && !is_brief ? 3 : 1, halved = is_short && is_brief ? 8 : 4;
  const int first_quartered = max(0, slabs - blocks * quartered / 16);
  const int first_halved = max(0, first_quartered - blocks * halved / 16);
  if (index < first_halved) return {index};
  index -= first_halved;
  const int halves = 2 * (first_quartered - first_halved);
  if (index < halves) return {first_halved + index / 2, index % 2, 2};
  index -= halves;
  return {first_quartered + index / 4, index % 4, 4};
}

// Returns item `index` of the list, which is in the order of phases, then experts, then slabs, so that the
// token tiles that share a slab of weights are adjacent. A slab's last parts may have no tiles.
template <class C>
__device__ WorkItem find_item(const GemmArgs& args, const int* tile_start, int index) {
  WorkItem item;
  item.phase = args.num_phases - 1;
  const int tiles = tile_start[args.num_experts], slabs = tiles * args.phases[item.phase].slabs;
  const int earlier = item.phase == 0 ? 0 : tiles * args.phases[0].slabs;
  SlabPart part{index};
  if (index < earlier) {
    item.phase = 0;
  } else {
    const bool is_brief = 3 * args.phases[item.phase].k < 2 * args.phases[0].k;
    part = part_of_last_phase(slabs, earlier + slabs, is_brief, index - earlier);
    if (part.slab >= slabs) return item;
  }
  const GemmPhase& phase = args.phases[item.phase];
  const int e = expert_at(tile_start, args.num_experts, part.slab / phase.slabs);
  item.expert = e;
  item.token_tiles = tile_start[e + 1] - tile_start[e];
  const int within = part.slab - tile_start[e] * phase.slabs, most_tiles = C::kTiles / part.count;
  item.first_tile = within / item.token_tiles * C::kTiles + part.index * most_tiles;
  item.weight_tiles = min(most_tiles, phase.row_tiles - item.first_tile);
  const int count = rows_of(args.rows, e);
  const int each = ((count + item.token_tiles - 1) / item.token_tiles + 7) / 8 * 8;
  const int first = within % item.token_tiles * each;
  item.count = min(each, count - first);
  item.first_row =
      (args.rows.capacity == 0 ? args.rows.offsets[e] : e * static_cast<int>(args.rows.capacity)) + first;
  return item;
}

// Returns the next index of the work list: from the counter that all blocks share or, without a counter,
// round-robin.
__device__ __forceinline__ int claim_item(const GemmArgs& args, int turn) {
  if (args.rows.progress == nullptr) return static_cast<int>(blockIdx.x + turn * gridDim.x);
  return atomicAdd(args.rows.progress, 1);
}

// A slab's weights in memory.
template <class C>
struct ItemWeights {
  const uint8_t* first;
  const uint8_t* row_factors;  // w4a8
  int64_t stride;              // bytes from a tile to the tile of the next columns
  int tiles;

  __device__ ItemWeights(const GemmPhase& phase, const WorkItem& item) : tiles(item.weight_tiles) {
    const int k_tiles = (phase.k + 63) / 64, tile_columns = C::kFp8 ? (k_tiles + 1) / 2 : k_tiles;
    const int64_t matrix_bytes =
        C::kFp8 ? phase.matrix_bytes : int64_t{phase.row_tiles} * k_tiles * C::kTileBytes;
    first = phase.w + item.expert * matrix_bytes +
            tile_index(phase.row_tiles, tile_columns, item.first_tile, 0) * C::kTileBytes;
    stride = tile_group_size(phase.row_tiles, item.first_tile) * C::kTileBytes;
    row_factors =
        phase.w + item.expert * matrix_bytes + phase.factors_offset + item.first_tile * 64 * sizeof(float);
  }
  // Loads `count` of a stage's two chunks of 64 columns, beginning with `chunk`. The item's row factors are
  // loaded with its first chunk.
  __device__ __forceinline__ void load(int chunk, int count, uint8_t* to, float* factors,
                                       uint64_t* full) const {
    if constexpr (C::kFp8)
      load_fp8(chunk, count == 2, to, factors, full);
    else {
      const uint32_t bytes = tiles * C::kTileBytes;
      ptx::mbarrier_arrive_expect_tx(full, bytes * count);
      for (int i = 0; i < count; ++i)
        ptx::bulk_load(to + i * C::kTiles * C::kTileBytes, first + (chunk + i) * stride, bytes, full);
    }
  }

 private:
  __device__ __forceinline__ void load_fp8(int chunk, bool is_whole, uint8_t* to, float* factors,
                                           uint64_t* full) const {
    constexpr uint32_t kScaleBytes = C::kTileBytes - 2 * kFp8HalfCodeBytes;
    const uint32_t factor_bytes = chunk == 0 ? tiles * 64 * static_cast<uint32_t>(sizeof(float)) : 0;
    const uint32_t tile_bytes = is_whole ? C::kTileBytes : kFp8HalfCodeBytes + kScaleBytes;
    ptx::mbarrier_arrive_expect_tx(full, tiles * tile_bytes + factor_bytes);
    if (factor_bytes > 0) ptx::bulk_load(factors, row_factors, factor_bytes, full);
    const uint8_t* from = first + chunk / 2 * stride;
    if (is_whole) return ptx::bulk_load(to, from, tiles * C::kTileBytes, full);
    // The last 64 columns: the codes of the other half are not loaded, because the tokens are zeros there.
    for (int t = 0; t < tiles; ++t, from += C::kTileBytes, to += C::kTileBytes) {
      ptx::bulk_load(to, from, kFp8HalfCodeBytes, full);
      ptx::bulk_load(to + 2 * kFp8HalfCodeBytes, from + 2 * kFp8HalfCodeBytes, kScaleBytes, full);
    }
  }
};

// Takes work and loads its weights, in one warp. All lanes compute tile_start; lane 0 does the rest.
template <class C>
__device__ void schedule_and_load_weights(const GemmArgs& args, GemmShared<C>& shared) {
  count_tiles(args.rows, args.num_experts, C::kMaxN, shared.tile_start);
  if (threadIdx.x % 32 != 0) return;
  RingPlace<C::kStages> stage;
  RingPlace<C::kItems> place;
  RingPlace<C::kItems + 1> scales;
  int index = claim_item(args, 0);
  for (int turn = 1;; ++turn, place.next(), scales.next()) {
    WorkItem item = find_item<C>(args, shared.tile_start, index);
    for (; item.expert >= 0 && item.weight_tiles <= 0; ++turn)
      item = find_item<C>(args, shared.tile_start, claim_item(args, turn));
    ptx::mbarrier_wait(&shared.item_empty[place.slot], place.parity ^ 1);
    shared.items[place.slot] = item;
    ptx::mbarrier_arrive(&shared.item_full[place.slot]);
    if (item.expert < 0) return;
    const GemmPhase& phase = args.phases[item.phase];
    const ItemWeights<C> weights(phase, item);
    const int chunks = (phase.k + 63) / 64;
    const int last_claim = max(0, chunks - 3 * C::kChunks);
    for (int chunk = 0; chunk < chunks; chunk += C::kChunks, stage.next()) {
      // Claims late, so that a block does not take work that another block could start sooner.
      if (chunk <= last_claim && chunk + C::kChunks > last_claim) index = claim_item(args, turn);
      ptx::mbarrier_wait(&shared.empty[stage.slot], stage.parity ^ 1);
      weights.load(chunk, min(C::kChunks, chunks - chunk), shared.weights[stage.slot],
                   shared.scales[C::kFp8 ? scales.slot : 0].rows, &shared.full[stage.slot]);
    }
  }
}

// Waits until all rows of the item's expert have been written by the previous phase (w4a8: and quantised).
template <class C>
__device__ void wait_for_rows(const GemmArgs& args, const WorkItem& item) {
  const int expected =
      args.phases[0].slabs * item.token_tiles * C::kGroups + (C::kFp8 ? 1 : 0);  // 1: quantised
  while (ptx::load_acquire(args.rows.progress + 1 + item.expert) < expected) __nanosleep(64);
}

// The stages whose token copies a warp has begun but not yet announced: at most kAhead, and none after
// announce<0>().
template <class C>
struct TokenCopies {
  static constexpr int kAhead = 1;
  RingPlace<C::kStages> place;
  int begun = 0;

  template <int kLeft>
  __device__ __forceinline__ void announce(GemmShared<C>& shared) {
    ptx::cp_async_wait<kLeft>();
    ptx::fence_proxy_async();  // wgmma reads what cp.async wrote
    __syncwarp();
    for (; begun > kLeft; --begun, place.next())
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.full[place.slot]);
  }
  __device__ __forceinline__ void add(GemmShared<C>& shared) {
    ptx::cp_async_commit();
    if (++begun > kAhead) announce<kAhead>(shared);
  }
};

// w4a8: returns the shared address of the 16 bytes of columns 8 * piece ... 8 * piece + 7 of a slab's token
// r. Two steps of the tensor cores share eight of the 32 columns that a lane reads; the eight columns of the
// s-th pair of steps are at place 4 s + q. Odd rows have their halves swapped to avoid bank conflicts.
template <class C>
__device__ __forceinline__ uint32_t fp8_token_piece(const uint8_t* tokens, int r, int piece) {
  const int place = piece % 4 * 4 + piece / 4;
  return ptx::shared_address(tokens) + place / 8 * C::kChunkBytes + r * 128 + (place % 8 ^ r % 2 * 4) * 16;
}

// Loads tokens, four rows of 64 columns per instruction. Called by the loader warps.
template <class C>
__device__ void load_tokens(const GemmArgs& args, GemmShared<C>& shared, int warp) {
  constexpr int kRounds = (C::kMaxN / 4 + C::kLoaderWarps - 1) / C::kLoaderWarps;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  RingPlace<C::kStages> stage;
  RingPlace<C::kItems> place;
  RingPlace<C::kItems + 1> scales;
  TokenCopies<C> copies;
  for (;; place.next(), scales.next()) {
    copies.template announce<0>(shared);  // no stage is held back while this warp waits for others
    ptx::mbarrier_wait(&shared.item_full[place.slot], place.parity);
    const WorkItem item = shared.items[place.slot];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.item_empty[place.slot]);
    if (item.expert < 0) return;
    const GemmPhase& phase = args.phases[item.phase];
    if (phase.waits) wait_for_rows<C>(args, item);
    uint32_t source[kRounds];  // offsets of this lane's rows, in units of 16 bytes
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int r = (i * C::kLoaderWarps + warp) * 4 + lane / 8;
      int row = item.first_row + r;
      if (r < item.count && phase.gather) row = args.rows.slot_of_row[row] / args.topk;
      if constexpr (C::kFp8)
        if (piece == 0 && r < item.count) shared.scales[scales.slot].tokens[r] = phase.b_row_scales[row];
      source[i] = static_cast<uint32_t>(row) * static_cast<uint32_t>(phase.k / 8);
    }
    const auto* b = reinterpret_cast<const uint4*>(phase.b);
    for (int k = 0; k < phase.k; k += C::kChunks * 64, stage.next()) {
      ptx::mbarrier_wait(&shared.empty[stage.slot], stage.parity ^ 1);
#pragma unroll
      for (int chunk = 0; chunk < C::kChunks; ++chunk) {
        const int column = k + chunk * 64 + piece * 8;
        const uint32_t dst = ptx::shared_address(shared.tokens[stage.slot] + chunk * C::kChunkBytes);
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int r = (i * C::kLoaderWarps + warp) * 4 + lane / 8;
          if (r >= item.count) break;
          ptx::cp_async16(C::kFp8 ? fp8_token_piece<C>(shared.tokens[stage.slot], r, chunk * 8 + piece)
                                  : dst + r * 128 + ((piece ^ r % 8) * 16),
                          b + (column < phase.k ? source[i] + column / 8 : 0), column < phase.k ? 16 : 0);
        }
      }
      copies.add(shared);
    }
  }
}

}  // namespace fp4moe::sm90
