// The work list of the expert GEMMs (sm90_expert_gemm.cu): which expert, weight rows and tokens a block takes
// next, and the ring of stages through which its warps pass weights and tokens. Device code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tile_layout.h"
#include "kernels/cuda/work_list.cuh"
#include "kernels/device_moe.h"

namespace fp4moe::sm90 {

enum class Epilogue : uint8_t { kGated, kRelu2, kDown };

// One GEMM: out[row, n] = epilogue(sum over k of b[row, k] * w[expert, n, k]).
struct GemmPhase {
  Epilogue epilogue = Epilogue::kDown;
  int cols = 0;       // N of out: I or H
  int row_tiles = 0;  // of the weights: tiles of 64 rows
  int k = 0;          // K
  int slabs = 0;      // ceil(row_tiles / tiles of a block)
  const uint8_t* w = nullptr;
  const bf16* b = nullptr;  // [rows, K]
  bool gather = false;      // row r of b is slot_of_row[r] / topk
  bool waits = false;       // for the phase before it, expert by expert
  const float* b_row_scales = nullptr;
  const float* bias = nullptr;  // [L, cols], gated [L, 2, cols], or null
  void* out = nullptr;          // [rows, cols]
  bool out_is_f32 = false;
};

struct GemmArgs {
  GemmPhase phases[2];
  int num_phases = 1;
  int num_experts = 0;
  int topk = 1;
  Activation activation;
  const float* scales = nullptr;  // [L, 3]
  DeviceRows rows;
};

// What a block works on: `count` rows from first_row on, times the weight rows of a slab.
struct WorkItem {
  int phase = 0, expert = -1, slab = 0, first_row = 0, count = 0;  // expert -1: no more work
  int tiles = 0;                                                   // token tiles of the expert
};

// By rows of an expert: few are multiplied by mma.sync, whose warps do not wait for each other, many by
// wgmma, where one dequantisation serves more tokens.
enum class RowClass : uint8_t { kFew, kMany };

// A block's slab is kGroups times kGroupTiles tiles of 64 rows, kGroupTiles for each consumer warpgroup,
// times kMaxN tokens at most; a stage holds kChunks times 64 columns: weights [kChunks][kTiles] tiles.
template <Fp4Format kFormatT, RowClass kRowsT>
struct GemmConfig {
  static constexpr Fp4Format kFormat = kFormatT;
  static constexpr bool kFew = kRowsT == RowClass::kFew;
  static constexpr int kGroups = 4, kGroupTiles = kFew ? 2 : 1, kTiles = kGroups * kGroupTiles;
  static constexpr int kMaxN = kFew ? 32 : 96, kChunks = 2, kItems = 4;
  static constexpr int kTileBytes = static_cast<int>(tile_bytes(kFormat));
  static constexpr int kWeightBytes = kTiles * kChunks * kTileBytes;  // of a stage
  static constexpr int kChunkBytes = kMaxN * 128;                     // of tokens
  static constexpr int kThreads = (kGroups + 1) * 128, kLoaderWarps = 3;
  static constexpr int kProducerRegs = 32, kConsumerRegs = 112;  // together what a block is launched with
  static constexpr int kOutTokens = 16, kOutPitch = 68;  // of the sums on their way out: [tokens][pitch] f32
  static constexpr int kOutBytes = kGroups * kOutTokens * kOutPitch * 4;
  static constexpr int kStages = (220 * 1024 - kOutBytes) / (kWeightBytes + kChunks * kChunkBytes);
  static_assert(kTileGroup % kTiles == 0);  // a slab's tiles lie side by side
};

template <class C>
struct GemmShared {
  alignas(1024) uint8_t tokens[C::kStages][C::kChunks * C::kChunkBytes];
  alignas(128) uint8_t weights[C::kStages][C::kWeightBytes];
  alignas(16) float out[C::kGroups][C::kOutTokens * C::kOutPitch];
  uint64_t full[C::kStages], empty[C::kStages], item_full[C::kItems], item_empty[C::kItems];
  WorkItem items[C::kItems];
  int tile_start[1];  // [L + 1]: token tiles before each expert
};

// A warp is done with what a barrier of consumers guards.
__device__ __forceinline__ void release(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

__device__ __forceinline__ int rows_of(const DeviceRows& rows, int expert) {
  const int count = rows.counts[expert];
  return rows.capacity == 0 ? count : max(0, min(count, static_cast<int>(rows.capacity)));
}

// Token tiles before each expert. One warp.
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

// Item `index` of the list: phase by phase, expert by expert, slab by slab, so that the token tiles that
// share a slab of weights are neighbours.
template <class C>
__device__ WorkItem find_item(const GemmArgs& args, const int* tile_start, int index) {
  WorkItem item;
  const int total = tile_start[args.num_experts];
  int slabs = args.phases[0].slabs;
  if (index >= total * slabs) {
    index -= total * slabs;
    if (args.num_phases == 1) return item;
    item.phase = 1;
    slabs = args.phases[1].slabs;
    if (index >= total * slabs) return item;
  }
  const int tile = index / slabs;
  const int e = expert_at(tile_start, args.num_experts, tile);
  item.expert = e;
  item.tiles = tile_start[e + 1] - tile_start[e];
  const int within = index - tile_start[e] * slabs;
  item.slab = within / item.tiles;
  const int count = rows_of(args.rows, e);
  const int each = ((count + item.tiles - 1) / item.tiles + 7) / 8 * 8;
  const int first = within % item.tiles * each;
  item.count = min(each, count - first);
  item.first_row =
      (args.rows.capacity == 0 ? args.rows.offsets[e] : e * static_cast<int>(args.rows.capacity)) + first;
  return item;
}

// The next index of the work list: of the counter that all blocks share, or in turns.
__device__ __forceinline__ int claim_item(const GemmArgs& args, int turn) {
  if (args.rows.progress == nullptr) return static_cast<int>(blockIdx.x + turn * gridDim.x);
  return atomicAdd(args.rows.progress, 1);
}

// The warp that takes work and brings its weights. Lane 0 alone; tile_start is made by all.
template <class C>
__device__ void schedule_and_load_weights(const GemmArgs& args, GemmShared<C>& shared) {
  count_tiles(args.rows, args.num_experts, C::kMaxN, shared.tile_start);
  if (threadIdx.x % 32 != 0) return;
  RingPlace<C::kStages> stage;
  RingPlace<C::kItems> place;
  int index = claim_item(args, 0);
  for (int turn = 1;; ++turn, place.next()) {
    const WorkItem item = find_item<C>(args, shared.tile_start, index);
    ptx::mbarrier_wait(&shared.item_empty[place.slot], place.parity ^ 1);
    shared.items[place.slot] = item;
    ptx::mbarrier_arrive(&shared.item_full[place.slot]);
    if (item.expert < 0) return;
    const GemmPhase& phase = args.phases[item.phase];
    const int chunks = (phase.k + 63) / 64, first_tile = item.slab * C::kTiles;
    const int64_t first =
        int64_t{item.expert} * phase.row_tiles * chunks + tile_index(phase.row_tiles, chunks, first_tile, 0);
    const uint8_t* w = phase.w + first * C::kTileBytes;
    const int64_t stride = tile_group_size(phase.row_tiles, first_tile) * C::kTileBytes;
    const uint32_t chunk_bytes = min(C::kTiles, phase.row_tiles - first_tile) * C::kTileBytes;
    const int last_claim = max(0, chunks - 3 * C::kChunks);
    for (int chunk = 0; chunk < chunks; chunk += C::kChunks, stage.next()) {
      // Late, so that a block takes no work that another could begin sooner.
      if (chunk <= last_claim && chunk + C::kChunks > last_claim) index = claim_item(args, turn);
      const int count = min(C::kChunks, chunks - chunk);
      ptx::mbarrier_wait(&shared.empty[stage.slot], stage.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(&shared.full[stage.slot], chunk_bytes * count);
      for (int i = 0; i < count; ++i)
        ptx::bulk_load(shared.weights[stage.slot] + i * C::kTiles * C::kTileBytes, w + (chunk + i) * stride,
                       chunk_bytes, &shared.full[stage.slot]);
    }
  }
}

// Waits until `expert`'s rows of the phase before are written.
template <class C>
__device__ void wait_for_rows(const GemmArgs& args, const WorkItem& item) {
  const int expected = args.phases[0].slabs * item.tiles * C::kGroups;
  while (ptx::load_acquire(args.rows.progress + 1 + item.expert) < expected) __nanosleep(64);
}

// The stages whose token copies a warp has begun and not yet announced: the last kAhead, until flush().
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

// The warps that bring tokens, four rows of 64 columns an instruction.
template <class C>
__device__ void load_tokens(const GemmArgs& args, GemmShared<C>& shared, int warp) {
  constexpr int kRounds = (C::kMaxN / 4 + C::kLoaderWarps - 1) / C::kLoaderWarps;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  RingPlace<C::kStages> stage;
  RingPlace<C::kItems> place;
  TokenCopies<C> copies;
  for (;; place.next()) {
    copies.template announce<0>(shared);  // nothing is held back while this waits for others
    ptx::mbarrier_wait(&shared.item_full[place.slot], place.parity);
    const WorkItem item = shared.items[place.slot];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.item_empty[place.slot]);
    if (item.expert < 0) return;
    const GemmPhase& phase = args.phases[item.phase];
    if (phase.waits) wait_for_rows<C>(args, item);
    uint32_t source[kRounds];  // of this lane's rows, in units of 16 bytes
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int r = (i * C::kLoaderWarps + warp) * 4 + lane / 8;
      int row = item.first_row + r;
      if (r < item.count && phase.gather) row = args.rows.slot_of_row[row] / args.topk;
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
          ptx::cp_async16(dst + r * 128 + ((piece ^ r % 8) * 16),
                          b + (column < phase.k ? source[i] + column / 8 : 0), column < phase.k ? 16 : 0);
        }
      }
      copies.add(shared);
    }
  }
}

}  // namespace fp4moe::sm90
