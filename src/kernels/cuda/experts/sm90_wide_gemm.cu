// The expert GEMMs of w4a16 on Hopper for many rows per expert, and of bf16 experts for any number.
//
// Computes  gate_up: h[r] = activation(gate x, up x); down: y[r] = W h + bias; with the weights of row r's
//           expert.
// Shapes    weights in tiles (tile_layout.h), tokens in slabs (token_slabs.h); y [rows, H] bf16.
//           A unit is 4 row tiles (256 weight rows) x up to 256 tokens of one expert x all of K.
// Bytes     weights once from HBM, tokens once for each 256 weight rows, from L2.
// Flops     2 rows N K, with a unit's tokens padded to a multiple of 16.
// Bound     the tensor cores; below about 60 rows per expert, the instructions that unpack (bf16: below about
//           200 rows, HBM).
// Launch    persistent clusters of two blocks, which share a unit's tokens: each fetches half of them for
//           both blocks. A block has two warpgroups that multiply, each with one row tile, and a thread that
//           loads.
// Numerics  f32 sums in ascending k, one chain for each output; weights exact in bf16. Same bits on every
//           run.
//
// The thread that loads finds the units and passes them on with their first stage, so that no warp waits for
// a search between two units. A warpgroup stages its results in two buffers by turns.
//
// Weights are the register operand of wgmma: a dequantised tile serves 256 tokens. While the tensor cores
// work on 64 columns, the next 64 are dequantised. Two alternatives were slower on an H200: three warpgroups
// with 128 tokens, from 128 rows per expert on (7 to 17 %), and four warpgroups with 64 tokens, always.
#include "kernels/cuda/experts/sm90_wide_gemm.h"

#include <cuda_runtime.h>

#include <string>

#include "base/check.h"
#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/experts/sm90_cluster_gemm.cuh"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/layout/token_slabs.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace fp4moe {
namespace wide {
namespace {

using namespace sm90;

constexpr int kGroups = 2, kUnitTiles = kGroups * kCluster;
using Part = UnitPart<kUnitTiles>;
constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kConsumerRegs = 232, kProducerRegs = 40;  // together: a launched block's registers
constexpr int kMaxTokens = 256, kTokenBytes = kMaxTokens * static_cast<int>(kSlabBytes);
constexpr int kOutPitch = 144;  // bytes of a staged token; avoids bank conflicts
constexpr int kOutBytes = kOutTokens * kOutPitch;

template <int N>
__device__ __forceinline__ void add(float (&d)[kMaxTokens / 2], const uint32_t (&a)[4][4], uint64_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) Wgmma<N>::add(d, a[s], wgmma_b_advance(tokens, 32 * s));
  wgmma_commit();
}

// d += a * tokens, with the instruction for 16 * n16 tokens. Every N works on the same registers.
__device__ __forceinline__ void add_any(int n16, float (&d)[kMaxTokens / 2], const uint32_t (&a)[4][4],
                                        uint64_t tokens) {
  // clang-format off
  switch (n16) {
    case 1: return add<16>(d, a, tokens);
    case 2: return add<32>(d, a, tokens);
    case 3: return add<48>(d, a, tokens);
    case 4: return add<64>(d, a, tokens);
    case 5: return add<80>(d, a, tokens);
    case 6: return add<96>(d, a, tokens);
    case 7: return add<112>(d, a, tokens);
    case 8: return add<128>(d, a, tokens);
    case 9: return add<144>(d, a, tokens);
    case 10: return add<160>(d, a, tokens);
    case 11: return add<176>(d, a, tokens);
    case 12: return add<192>(d, a, tokens);
    case 13: return add<208>(d, a, tokens);
    case 14: return add<224>(d, a, tokens);
    case 15: return add<240>(d, a, tokens);
    default: return add<256>(d, a, tokens);
  }
  // clang-format on
}

template <Fp4Format kFormatT>
struct Config {
  static constexpr Fp4Format kFormat = kFormatT;
  static constexpr int kTileBytes = static_cast<int>(tile_bytes(kFormat));
  static constexpr int kStages = kFormat == Fp4Format::kNone ? 4 : 5;  // what fits in shared memory
  static constexpr int kGroups = wide::kGroups, kMaxTokens = wide::kMaxTokens;

  template <class Shared>
  static __device__ __forceinline__ void unpack(const Shared& shared, int slot, uint32_t (&a)[4][4]) {
    TileWords<kFormat> words;
    words.load(shared.weights[slot][threadIdx.x / 128], threadIdx.x / 32 % 4, threadIdx.x % 32);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      words.decode(s, a[s]);
      keep_registers(a[s]);  // ready before the fence; otherwise, wgmma would be serialised
    }
  }
  static __device__ __forceinline__ void add(int n16, float (&d)[kMaxTokens / 2], const uint32_t (&a)[4][4],
                                             uint64_t tokens) {
    add_any(n16, d, a, tokens);
  }
};
// Number of stages by which the second group starts after the first, so that the two do not write out their
// results at once.
constexpr int kLag = 3;

struct Args {
  Epilogue epilogue;
  int cols, row_tiles, slabs, num_experts;  // cols: N of out; slabs: of tokens and weights
  const uint8_t* weights;
  const uint8_t* tokens;
  int64_t token_rows;  // of the token slabs
  const float* bias;   // [L, cols] (gated: [L, 2, cols]) or null
  const float* scales;
  Activation activation;
  DeviceRows rows;
  uint8_t* out_slabs;  // if not null, used instead of `out`
  bf16* out;           // [rows, cols]
};

// A unit and the first row of its expert.
struct PlacedUnit {
  Unit unit;
  int expert_row;

  __device__ int64_t first_slab_row() const {
    return slab_first_row(unit.expert, expert_row, 0) + unit.first;
  }
};
// Places for units from which warps may still read: the loading thread is at most kStages stages, of as many
// units, ahead of any warp.
constexpr int kUnits = 8;

template <class C>
struct Shared {
  static_assert(kUnits > C::kStages);
  alignas(1024) uint8_t tokens[C::kStages][kTokenBytes];
  alignas(128) uint8_t weights[C::kStages][kGroups][C::kTileBytes];
  alignas(128) uint8_t out[kGroups][2][kOutBytes];
  PlacedUnit units[kUnits];
  uint64_t full[C::kStages], empty[C::kStages];
  int unit_start[1];  // [L + 1]: token tiles before each expert
};

template <class C>
__device__ void load_stages(const Args& a, Shared<C>& shared, int num_units) {
  constexpr int kTileBytes = C::kTileBytes;
  RingPlace<C::kStages> ring;
  static_assert(kGroups == 2 && kTileGroup % kUnitTiles == 0);
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  int count = 0;  // of units so far
  for (int u = blockIdx.x / kCluster; u < num_units; u += gridDim.x / kCluster, ++count) {
    const Unit unit = find_unit<kUnitTiles>(a.rows, a.row_tiles, a.num_experts, shared.unit_start, u);
    const PlacedUnit placed = {unit, a.rows.offsets[unit.expert]};
    ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);  // of the unit's first stage
    shared.units[count % kUnits] = placed;
    const int tokens = (unit.count + 7) / 8 * 8, half = (tokens / 2 + 7) / 8 * 8;
    const uint32_t bytes = (rank == 0 ? half : tokens - half) * static_cast<int>(kSlabBytes);
    const int64_t first_row = placed.first_slab_row() + rank * half;
    const Part parts[kGroups] = {{unit, rank * kGroups}, {unit, rank * kGroups + 1}};
    const bool is_pair = parts[0].tile >= 0 && parts[1].tile == parts[0].tile + 1;  // contiguous
    const uint8_t* w[kGroups];
    uint32_t expected = tokens * static_cast<int>(kSlabBytes);
    for (int g = 0; g < kGroups; ++g) {
      const int tile = max(parts[g].tile, 0);
      w[g] = a.weights +
             (int64_t{unit.expert} * a.row_tiles * a.slabs + tile_index(a.row_tiles, a.slabs, tile, 0)) *
                 kTileBytes;
      if (parts[g].tile >= 0) expected += kTileBytes;
    }
    const int64_t stride = tile_group_size(a.row_tiles, unit.first_tile) * kTileBytes;
    for (int k = 0; k < a.slabs; ++k, ring.next()) {
      uint64_t* full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, expected);
      if (parts[0].tile >= 0)
        ptx::bulk_load(shared.weights[ring.slot][0], w[0] + k * stride, is_pair ? 2 * kTileBytes : kTileBytes,
                       full);
      if (parts[1].tile >= 0 && !is_pair)
        ptx::bulk_load(shared.weights[ring.slot][1], w[1] + k * stride, kTileBytes, full);
      if (bytes > 0)
        ptx::bulk_load_multicast(shared.tokens[ring.slot] + rank * half * kSlabBytes,
                                 a.tokens + (k * a.token_rows + first_row) * kSlabBytes, bytes, full,
                                 (1 << kCluster) - 1);
    }
  }
}

// Applies the scales and biases to a thread's sums.
struct Scaled {
  TileRows rows;

  __device__ __forceinline__ void operator()(const float* sums, int, float (&v)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(sums[i], rows.scale[i / 2], rows.bias[i / 2]);
  }
};

// Copies staged tokens to the output in 16-byte pieces, kPieces per token. first: index of the first token in
// the unit.
template <bool kGated>
__device__ __forceinline__ void store_out(const Args& a, const PlacedUnit& placed, int tile, int first,
                                          int count, const uint8_t* staged) {
  constexpr int kPieces = kGated ? 4 : 8;
  const int thread = threadIdx.x % 128, piece = thread % kPieces, column_piece = tile * kPieces + piece;
  // Slabs are padded with zeros: half of the last slab may have no tile.
  const int num_pieces = a.cols / 8;
  const bool in_slabs = a.out_slabs != nullptr;
  const bool fills = in_slabs && kGated && tile + 1 == a.row_tiles && tile % 2 == 0;
  if (column_piece >= num_pieces && !in_slabs) return;
  const int64_t row = in_slabs ? placed.first_slab_row() : int64_t{placed.expert_row} + placed.unit.first;
#pragma unroll 2
  for (int token = thread / kPieces; token < count; token += 128 / kPieces) {
    uint4 v = *reinterpret_cast<const uint4*>(staged + token * kOutPitch + piece * 16);
    if (!in_slabs) {
      *reinterpret_cast<uint4*>(a.out + (row + first + token) * a.cols + column_piece * 8) = v;
      continue;
    }
    if (column_piece >= num_pieces) v = {0, 0, 0, 0};
    uint8_t* to = a.out_slabs;
    *reinterpret_cast<uint4*>(to + slab_piece_offset(a.token_rows, row + first + token, column_piece)) = v;
    if (fills)
      *reinterpret_cast<uint4*>(to + slab_piece_offset(a.token_rows, row + first + token, column_piece + 4)) =
          uint4{0, 0, 0, 0};
  }
}

// A warpgroup's two buffers for staged tokens, used by turns. There is a barrier between staging and storing:
// a buffer is staged again two barriers later, when all warps have stored its previous tokens.
struct Staging {
  uint8_t* buffers;
  int turn = 0;

  __device__ uint8_t* next() {
    turn ^= 1;
    return buffers + turn * kOutBytes;
  }
};

template <bool kGated>
__device__ __forceinline__ void finish(const Args& a, const PlacedUnit& placed, const Part& part,
                                       const Scaled& scaled, Staging& staging,
                                       const float (&d)[kMaxTokens / 2]) {
  const int group = threadIdx.x / 128;
#pragma unroll
  for (int p = 0; p < kMaxTokens / kOutTokens; ++p) {
    if (p * kOutTokens >= part.count) break;
    uint8_t* const out = staging.next();
    stage_out<kGated, kOutPitch>(a.activation, a.epilogue == Epilogue::kRelu2, scaled, d + p * kOutTokens / 2,
                                 out + threadIdx.x / 32 % 4 * (kGated ? 16 : 32));
    ptx::named_barrier(1 + group, 128);
    store_out<kGated>(a, placed, part.tile, part.first + p * kOutTokens,
                      min(kOutTokens, part.count - p * kOutTokens), out);
  }
}

template <class C>
__device__ void consume(const Args& a, Shared<C>& shared, int num_units) {
  RingPlace<C::kStages> ring;
  const int place = static_cast<int>(ptx::cluster_ctarank()) * kGroups + threadIdx.x / 128;
  const int first_unit = blockIdx.x / kCluster;
  Staging staging{shared.out[threadIdx.x / 128][0]};
  int count = 0;  // of units so far
  for (int u = first_unit; u < num_units; u += gridDim.x / kCluster, ++count) {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    const PlacedUnit& placed = shared.units[count % kUnits];
    const Part part(placed.unit, place);
    SlabSums<C> sums;
    if (u == first_unit) {
      wait_for_group_before<kGroups>();
      sums.lag = kLag < a.slabs ? kLag : 1;
      if (part.tile < 0) start_next_group<kGroups>();
    }
    if (part.tile < 0) {
      skip_stages(shared, ring, a.slabs);
      continue;
    }
    const Scaled scaled{{a.epilogue, a.scales, a.bias, a.cols, placed.unit.expert, part.tile}};
    sums.multiply_tiles(shared, ring, a.slabs, part.first, part.count);
    if (a.epilogue == Epilogue::kGated)
      finish<true>(a, placed, part, scaled, staging, sums.d);
    else
      finish<false>(a, placed, part, scaled, staging, sums.d);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) wide_gemm_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 32) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kUnitTiles * 4);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::grid_dependency_wait();
  if (threadIdx.x < 32) count_tiles(a.rows, a.num_experts, kMaxTokens, shared.unit_start);
  __syncthreads();
  ptx::cluster_sync();
  const int num_units = shared.unit_start[a.num_experts] * ((a.row_tiles + kUnitTiles - 1) / kUnitTiles);
  if (threadIdx.x >= kGroups * 128) {
    ptx::lower_registers<kProducerRegs>();
    if (threadIdx.x == kGroups * 128) load_stages(a, shared, num_units);
  } else {
    ptx::raise_registers<kConsumerRegs>();
    consume(a, shared, num_units);
  }
  ptx::cluster_sync();  // no block may signal a block that has exited
}

template <class C>
void launch_wide(const Args& a) {
  const size_t bytes = sizeof(Shared<C>) + sizeof(int) * a.num_experts;
  FP4MOE_CHECK(bytes <= static_cast<size_t>(device_limits().shared_bytes_per_block),
               "no room for the work list of " + std::to_string(a.num_experts) + " experts");
  prepare_kernel(wide_gemm_kernel<C>, {.shared_bytes = device_limits().shared_bytes_per_block});
  const auto blocks = static_cast<unsigned>(device_limits().num_sms / kCluster * kCluster);
  launch("wide_gemm", wide_gemm_kernel<C>, {blocks, kThreads, bytes, kCluster}, a);
}

void launch_wide(const DeviceExpertArgs& args, Args a) {
  const TiledExperts& e = args.experts;
  a.num_experts = static_cast<int>(e.num_experts);
  a.token_rows = num_slab_rows(args.rows.max_rows, 0, e.num_experts);
  a.scales = e.scales;
  a.activation = e.activation;
  a.rows = args.rows;
  if (e.format == Fp4Format::kMxfp4)
    launch_wide<Config<Fp4Format::kMxfp4>>(a);
  else if (e.format == Fp4Format::kNvfp4)
    launch_wide<Config<Fp4Format::kNvfp4>>(a);
  else
    launch_wide<Config<Fp4Format::kNone>>(a);
}

}  // namespace
}  // namespace wide

void sm90_wide_gate_up(const DeviceExpertArgs& args) {
  if (args.rows.max_rows == 0) return;
  const TiledExperts& e = args.experts;
  const bool gated = is_gated(e.activation.kind);
  wide::Args a = {};
  a.epilogue = gated ? sm90::Epilogue::kGated : sm90::Epilogue::kRelu2;
  a.cols = static_cast<int>(e.intermediate_size);
  a.row_tiles = static_cast<int>(num_tiles((gated ? 2 : 1) * e.intermediate_size));
  a.slabs = static_cast<int>(num_slabs(e.hidden_size * 2));
  a.weights = e.gate_up;
  a.tokens = static_cast<const uint8_t*>(args.x.data);
  a.bias = e.gate_up_bias;
  a.out_slabs = static_cast<uint8_t*>(args.h.data);
  wide::launch_wide(args, a);
}

void sm90_wide_down(const DeviceExpertArgs& args) {
  if (args.rows.max_rows == 0) return;
  const TiledExperts& e = args.experts;
  wide::Args a = {};
  a.epilogue = sm90::Epilogue::kDown;
  a.cols = static_cast<int>(e.hidden_size);
  a.row_tiles = static_cast<int>(num_tiles(e.hidden_size));
  a.slabs = static_cast<int>(num_slabs(e.intermediate_size * 2));
  a.weights = e.down;
  a.tokens = static_cast<const uint8_t*>(args.h.data);
  a.bias = e.down_bias;
  a.out = args.y_bf16;
  wide::launch_wide(args, a);
}

}  // namespace fp4moe
