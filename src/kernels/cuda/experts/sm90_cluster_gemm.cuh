// Code shared by the expert GEMMs for many rows (sm90_wide_gemm.cu, sm90_expert_gemm_fp8.cu): persistent
// clusters of two blocks take units of up to kUnitTiles row tiles times some tokens of one expert; each
// warpgroup of a cluster computes a part of the unit and writes its results through shared memory. Device
// code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/experts/sm90_expert_epilogue.cuh"
#include "kernels/cuda/experts/work_list.cuh"
#include "kernels/cuda/layout/token_slabs.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/device_moe.h"

namespace fp4moe::sm90 {

constexpr int kCluster = 2;
constexpr int kOutTokens = 32;  // tokens written out at a time

struct Unit {
  int expert = 0, first_tile = 0, tiles = 0;  // tiles: kUnitTiles row tiles, fewer at the end
  int first = 0, count = 0;                   // tokens of the expert
};

// A warpgroup's part of a unit. If a unit has few row tiles, several warpgroups share a row tile and split
// the tokens.
template <int kUnitTiles>
struct UnitPart {
  int tile = -1;             // -1: no part
  int first = 0, count = 0;  // tokens in the unit

  UnitPart() = default;
  __device__ UnitPart(const Unit& unit, int place) {
    const int sharers = kUnitTiles / unit.tiles;
    const int each = ((unit.count + sharers - 1) / sharers + 7) / 8 * 8;
    tile = unit.first_tile + place % unit.tiles;
    first = place / unit.tiles * each;
    count = max(0, min(each, unit.count - first));
    if (place >= sharers * unit.tiles || count == 0) tile = -1;
  }
};

// Returns unit `index` of the list, which is ordered by expert, then by group of row tiles, then by token
// tile. tile_start: number of token tiles before each expert (count_tiles()).
template <int kUnitTiles>
__device__ Unit find_unit(const DeviceRows& rows, int row_tiles, int num_experts, const int* tile_start,
                          int index) {
  const int groups = (row_tiles + kUnitTiles - 1) / kUnitTiles, tile = index / groups;
  Unit unit;
  unit.expert = expert_at(tile_start, num_experts, tile);
  const int count = rows.counts[unit.expert];
  const int tiles = tile_start[unit.expert + 1] - tile_start[unit.expert];
  const int tokens = ((count + tiles - 1) / tiles + 7) / 8 * 8;
  const int within = index - tile_start[unit.expert] * groups;
  unit.first_tile = within / tiles * kUnitTiles;
  unit.tiles = min(kUnitTiles, row_tiles - unit.first_tile);
  unit.first = within % tiles * tokens;
  unit.count = min(tokens, count - unit.first);
  return unit;
}

// Makes the warp arrive at the slot's empty barrier in both blocks of the cluster.
template <class Shared>
__device__ __forceinline__ void release_in_cluster(Shared& shared, int slot) {
  const int lane = threadIdx.x % 32;
  if (lane < kCluster) ptx::mbarrier_arrive_cluster(&shared.empty[slot], lane);
}

// Passes a unit's stages without multiplying.
template <class Shared, int kStages>
__device__ __forceinline__ void skip_stages(Shared& shared, RingPlace<kStages>& ring, int stages) {
  for (int k = 0; k < stages; ++k, ring.next()) {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    __syncwarp();
    release_in_cluster(shared, ring.slot);
  }
}

// A block's warpgroups start one after the other, some stages apart, so that they do not all write out their
// results at once. Each waits at a named barrier at which the previous one arrives.
template <int kGroups>
__device__ __forceinline__ void wait_for_group_before() {
  const int group = threadIdx.x / 128;
  if (group > 0) ptx::named_barrier(kGroups + group, 256);
}
template <int kGroups>
__device__ __forceinline__ void start_next_group() {
  const int group = threadIdx.x / 128;
  if (group + 1 < kGroups) ptx::named_barrier_arrive(1 + kGroups + group, 256);
}

// A warpgroup's sums over all of K. While the matrix unit works on a slab of columns, the next slab is
// unpacked. C::unpack(shared, slot, a) makes A operands from a slab of the group's row tile.
// C::add(n16, d, a, tokens): d += a * tokens, with the instruction for 16 * n16 tokens.
template <class C>
struct SlabSums {
  float d[C::kMaxTokens / 2];
  int before = -1;  // the slot whose tokens may still be read
  int lag = 0;      // stages after which the next group may begin; only for the block's first unit

  template <class Shared>
  __device__ __forceinline__ void step(Shared& shared, RingPlace<C::kStages>& ring, int n16, int first,
                                       uint32_t (&a)[4][4]) {
    const int slot = __shfl_sync(~0u, ring.slot, 0);  // lets the compiler know that slot is warp-uniform
    ptx::mbarrier_wait(&shared.full[slot], ring.parity);
    C::unpack(shared, slot, a);
    const uint32_t tokens = ptx::shared_address(shared.tokens[slot]) + first * static_cast<int>(kSlabBytes);
    C::add(n16, d, a, wgmma_b_descriptor(tokens));
    wgmma_wait<1>();
    if (before >= 0) release_in_cluster(shared, before);
    before = slot;
    ring.next();
    if (--lag == 0) start_next_group<C::kGroups>();
  }

  // first, count: the part's tokens in the unit.
  template <class Shared>
  __device__ __forceinline__ void multiply_tiles(Shared& shared, RingPlace<C::kStages>& ring, int slabs,
                                                 int first, int count) {
    const int n16 = __shfl_sync(~0u, (count + 15) / 16, 0);
    uint32_t a[2][4][4];
#pragma unroll
    for (int i = 0; i < C::kMaxTokens / 2; ++i) d[i] = 0;
    before = -1;
#pragma unroll 1
    for (int k = 0; k + 1 < slabs; k += 2) {
      step(shared, ring, n16, first, a[0]);
      step(shared, ring, n16, first, a[1]);
    }
    if (slabs % 2 != 0) step(shared, ring, n16, first, a[0]);
    wgmma_wait<0>();
    keep_registers(d);
    release_in_cluster(shared, before);
  }
};

// The tensor scales and biases of a thread's rows g and g + 8 of a row tile.
struct TileRows {
  float scale[2], bias[2] = {0, 0};

  // scales: [L, 3]; biases: [L, cols] (gated: [L, 2, cols]) or null.
  __device__ TileRows(Epilogue epilogue, const float* scales, const float* biases, int cols, int expert,
                      int tile) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    const bool gated = epilogue == Epilogue::kGated;
    scales += 3 * expert;
    scale[0] = scales[gated ? 0 : epilogue == Epilogue::kRelu2 ? 1 : 2];
    scale[1] = gated ? scales[1] : scale[0];
    if (biases == nullptr) return;
    const int col = gated ? tile * 32 + warp * 8 + g : tile * 64 + warp * 16 + g;
    const float* at = biases + int64_t{expert} * (gated ? 2 : 1) * cols;
    if (col < cols) bias[0] = at[col];
    if (gated ? col < cols : col + 8 < cols) bias[1] = at[gated ? cols + col : col + 8];
  }
};

// For results that will be rounded to bf16: the approximations' errors of 1e-6 do not matter. NaN stays NaN.
__device__ __forceinline__ float swiglu_fast(const SwigluShape& shape, float gate, float up) {
  float g, u;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(g) : "f"(gate), "f"(shape.limit));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(u) : "f"(up), "f"(shape.limit));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(u) : "f"(u), "f"(-shape.limit));
  return __fdividef(g, 1 + __expf(-shape.alpha * g)) * (u + shape.beta);
}

// Finishes a warp's 16 rows for kOutTokens tokens (d: their sums, as wgmma leaves them) and stores the
// results as bf16 in `out`: 32 bytes per token (gated: 16), in rows of kPitch bytes. scaled(sums, token, v)
// sets v to the four sums of a thread's two rows and two tokens, with scales and bias applied.
template <bool kGated, int kPitch, class Scaled>
__device__ __forceinline__ void stage_out(const Activation& activation, bool relu2, const Scaled& scaled,
                                          const float* d, uint8_t* out) {
  const int lane = threadIdx.x % 32;
  const SwigluShape shape = swiglu_shape(activation);
  constexpr int kBlocks = kGated ? 4 : 2;  // blocks of eight tokens at a time
  uint8_t* to = kGated ? out + lane * kPitch : out + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int first = 0; first < kOutTokens / 8; first += kBlocks) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      float v[4];
      scaled(d + 4 * (first + i), 8 * (first + i) + lane % 4 * 2, v);
      if constexpr (kGated) {
        pairs[i] = ptx::bf16_pair(swiglu_fast(shape, v[0], v[2]), swiglu_fast(shape, v[1], v[3]));
      } else {
        if (relu2)
          for (float& x : v) x = x < 0 ? 0 : x * x;
        pairs[2 * i] = ptx::bf16_pair(v[0], v[1]), pairs[2 * i + 1] = ptx::bf16_pair(v[2], v[3]);
      }
    }
    ptx::store_transposed(to + first * 8 * kPitch, pairs);
  }
}

}  // namespace fp4moe::sm90
