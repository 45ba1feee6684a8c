// The work of w4a8's expert GEMMs (sm90_expert_gemm_fp8.cu): the list of units, the ring that passes a
// block's units to its warps, and the ring of stages with weights and tokens. Device code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/experts/fp4_to_fp8.cuh"
#include "kernels/cuda/experts/sm90_cluster_gemm.cuh"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/device_moe.h"

namespace fp4moe::fp8 {

using namespace sm90;

constexpr int kWorks = 4;  // units found ahead

// d += a * tokens for one slab, with the instruction for 16 * n16 tokens; n16 is in the range kLow ... kHigh.
// All instructions work on the same registers.
template <int kLow, int kHigh, int kCount>
__device__ __forceinline__ void add_slab(int n16, float (&d)[kCount], const uint32_t (&a)[4][4],
                                         uint64_t tokens) {
  if constexpr (kLow < kHigh) {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (n16 <= kMiddle)
      add_slab<kLow, kMiddle>(n16, d, a, tokens);
    else
      add_slab<kMiddle + 1, kHigh>(n16, d, a, tokens);
  } else {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) Wgmma<16 * kLow>::add_e4m3(d, a[s], wgmma_b_advance(tokens, 32 * s));
    wgmma_commit();
  }
}

template <Fp4Format kFormatT, int kGroupsT>
struct Config {
  static constexpr Fp4Format kFormat = kFormatT;
  static constexpr int kGroups = kGroupsT, kUnitTiles = kGroups * kCluster;
  using Part = UnitPart<kUnitTiles>;
  static constexpr int kThreads = (kGroups + 1) * 128;
  // Together, these are the registers that a block is launched with.
  static constexpr int kConsumerRegs = kGroups == 2 ? 232 : kGroups == 3 ? 160 : 112;
  static constexpr int kProducerRegs = kGroups == 2 ? 40 : 32;
  static constexpr int kMaxTokens = kGroups == 2 ? 256 : kGroups == 3 ? 160 : 96;
  static constexpr int kTileBytes = static_cast<int>(fp8_tile_bytes(kFormat));
  static constexpr int kTokenBytes = kMaxTokens * static_cast<int>(kSlabBytes);
  static constexpr int kOutPitch = 48;  // bytes of a staged token of a warp; avoids bank conflicts
  static constexpr int kOutBytes = kOutTokens * kOutPitch;
  static constexpr int kStages =
      (217 * 1024 - kGroups * 4 * kOutBytes) / (kTokenBytes + kGroups * kTileBytes);
  // Number of stages by which a group starts after the previous one, so that the groups do not all write out
  // their results at once.
  static constexpr int kLag = kGroups == 2 ? 3 : 2;

  template <class Shared>
  static __device__ __forceinline__ void unpack(const Shared& shared, int slot, uint32_t (&a)[4][4]) {
    Fp8TileWords<kFormat> words;
    words.load(shared.weights[slot][threadIdx.x / 128], shared.table, threadIdx.x / 32 % 4, threadIdx.x % 32);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      words.make(s, a[s]);
      keep_registers(a[s]);  // ready before the fence; otherwise, wgmma would be serialised
    }
  }
  static __device__ __forceinline__ void add(int n16, float (&d)[kMaxTokens / 2], const uint32_t (&a)[4][4],
                                             uint64_t tokens) {
    add_slab<1, kMaxTokens / 16>(n16, d, a, tokens);
  }
};

struct Args {
  Epilogue epilogue;
  int cols, row_tiles, slabs, num_experts;  // cols: N of out; slabs: of tokens and weights
  const uint8_t* weights;                   // [L] matrices
  int64_t matrix_bytes, factors_offset;
  const uint8_t* tokens;
  int64_t token_rows;  // of the token slabs
  const float* token_scales;
  const float* scales;  // [L, 3]
  const float* bias;    // [L, cols] (gated: [L, 2, cols]) or null
  Activation activation;
  DeviceRows rows;
  bf16* out;  // [max_rows, cols]
};

// A unit as seen by one block of a cluster.
template <class C>
struct Work {
  int expert = -1;  // -1: no more work
  int count = 0;    // tokens
  int64_t out_row = 0, slab_row = 0;
  typename C::Part parts[C::kGroups];
};

template <class C>
struct Shared {
  alignas(1024) uint8_t tokens[C::kStages][C::kTokenBytes];
  alignas(128) uint8_t weights[C::kStages][C::kGroups][C::kTileBytes];
  alignas(128) uint8_t out[C::kGroups * 4][C::kOutBytes];
  uint2 table[128];  // the e4m3 bytes of the eight magnitudes, for each scale index
  alignas(128) float token_scales[kWorks][C::kMaxTokens];
  Work<C> works[kWorks];
  uint64_t full[C::kStages], empty[C::kStages], work_full[kWorks], work_empty[kWorks];
  int tile_start[1];  // [L + 1]: token tiles before each expert
};

// Returns unit `index` of the list as seen by this block.
template <class C>
__device__ inline Work<C> find_work(const Args& a, const int* tile_start, int index) {
  const Unit unit = find_unit<C::kUnitTiles>(a.rows, a.row_tiles, a.num_experts, tile_start, index);
  Work<C> work;
  work.expert = unit.expert;
  work.count = unit.count;
  const int64_t row = a.rows.capacity == 0 ? a.rows.offsets[unit.expert] : unit.expert * a.rows.capacity;
  work.out_row = row + unit.first;
  work.slab_row = slab_first_row(unit.expert, row, a.rows.capacity) + unit.first;
#pragma unroll
  for (int g = 0; g < C::kGroups; ++g)
    work.parts[g] = {unit, static_cast<int>(ptx::cluster_ctarank()) * C::kGroups + g};
  return work;
}

// Finds the block's next units. Called by one thread.
template <class C>
__device__ inline void schedule(const Args& a, Shared<C>& shared) {
  const int groups = (a.row_tiles + C::kUnitTiles - 1) / C::kUnitTiles;
  const int num_units = shared.tile_start[a.num_experts] * groups;
  RingPlace<kWorks> place;
  for (int u = blockIdx.x / kCluster;; u += gridDim.x / kCluster, place.next()) {
    const Work<C> work = u < num_units ? find_work<C>(a, shared.tile_start, u) : Work<C>();
    ptx::mbarrier_wait(&shared.work_empty[place.slot], place.parity ^ 1);
    shared.works[place.slot] = work;
    ptx::mbarrier_arrive(&shared.work_full[place.slot]);
    if (u >= num_units) return;
  }
}

// Loads weights, tokens and the tokens' scales. Called by one thread.
template <class C>
__device__ inline void load_stages(const Args& a, Shared<C>& shared) {
  constexpr int kTileBytes = C::kTileBytes, kRowBytes = static_cast<int>(kSlabBytes);
  RingPlace<C::kStages> ring;
  RingPlace<kWorks> place;
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  for (;; place.next()) {
    ptx::mbarrier_wait(&shared.work_full[place.slot], place.parity);
    const Work<C>& work = shared.works[place.slot];
    if (work.expert < 0) return;
    const int tokens = (work.count + 7) / 8 * 8, half = (tokens / 2 + 7) / 8 * 8;
    const uint32_t bytes = (rank == 0 ? half : tokens - half) * kRowBytes,
                   scale_bytes = tokens * sizeof(float);
    const uint8_t* x = a.tokens + (work.slab_row + rank * half) * int64_t{kRowBytes};
    const uint8_t* w[C::kGroups];
    uint32_t stride[C::kGroups];  // bytes to the tile of the next columns
    uint32_t expected = tokens * kRowBytes;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const int tile = work.parts[g].tile;
      w[g] = tile < 0 ? nullptr
                      : a.weights + work.expert * a.matrix_bytes +
                            fp8_tile_offset(C::kFormat, a.row_tiles, a.slabs, tile, 0);
      stride[g] = static_cast<uint32_t>(tile_group_size(a.row_tiles, max(tile, 0))) * kTileBytes;
      if (tile >= 0) expected += kTileBytes;
    }
    const float* scales = a.token_scales + work.slab_row;
    ptx::mbarrier_arrive(&shared.work_empty[place.slot]);
    for (int k = 0; k < a.slabs; ++k, ring.next()) {
      uint64_t* full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, expected + (k == 0 ? scale_bytes : 0));
      if (k == 0) ptx::bulk_load(shared.token_scales[place.slot], scales, scale_bytes, full);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g)
        if (w[g] != nullptr)
          ptx::bulk_load(shared.weights[ring.slot][g], w[g] + int64_t{k} * stride[g], kTileBytes, full);
      if (bytes > 0)
        ptx::bulk_load_multicast(shared.tokens[ring.slot] + rank * half * kRowBytes,
                                 x + k * a.token_rows * kRowBytes, bytes, full, (1 << kCluster) - 1);
    }
  }
}

}  // namespace fp4moe::fp8
