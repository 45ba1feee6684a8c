// Computes  the expert GEMMs of w4a8, see kernels/device_moe_fp8.h: out[row, n] = sum over k of
//           x[row, k] w[expert, n, k], then gate/up's activation or down's bias.
// Shapes    weights in tiles, tokens in slabs (fp8_tile_layout.h); out bf16 [max_rows, I] or [max_rows, H].
//           A unit is 4 row tiles (256 weight rows) x up to 256 tokens of one expert x all of K, or 8 x 128.
// Bytes     weights once from HBM (the token tiles of an expert are neighbours in the work list), tokens
//           once for each 256 or 512 weight rows, from L2.
// Flops     2 rows N K, a unit's tokens padded to 16. Bound: below some 100 tokens an expert the weight
//           bytes, above it the FP8 rate.
// Launch    persistent clusters of two blocks, which share a unit's tokens: each fetches half of them for
//           both. A block is two warpgroups (four for 128 tokens) that multiply, a row tile each, and a
//           thread that loads. Units are dealt in turns.
// Numerics  weights are the A operand, made in registers: a byte permute picks a magnitude's e4m3 byte from
//           the eight of its scale (a table in shared memory), some 0.9 instructions a weight. The matrix
//           unit adds in ascending K with about 14 bits: relative L2 1.4e-3 at K = 2880, beside 4e-2 of the
//           FP8 tokens; adding sums of 128 columns in f32 instead made that 5e-4 and cost 7 to 10 %. Same
//           bits on every run.
// Measured  H200, MXFP4, gate/up: 1348 TFLOP/s on 65536 rows of 32 experts (H 7168, I 2048), 934 on 32768
//           rows of 128 (2880, 2880), where what comes between two units shows: 1.1 of 17.6 us to find the
//           next one, 2.4 to write a unit's results.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "base/check.h"
#include "kernels/cuda/fp4_to_fp8.cuh"
#include "kernels/cuda/fp8_tile_layout.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sm90_cluster_gemm.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace fp8 {
namespace {

using namespace sm90;

template <Fp4Format kFormatT, int kGroupsT>
struct Config {
  static constexpr Fp4Format kFormat = kFormatT;
  static constexpr int kGroups = kGroupsT, kUnitTiles = kGroups * kCluster;
  using Part = UnitPart<kUnitTiles>;
  static constexpr int kThreads = (kGroups + 1) * 128;
  // Together what a block is launched with.
  static constexpr int kConsumerRegs = kGroups == 2 ? 232 : 112, kProducerRegs = kGroups == 2 ? 40 : 32;
  static constexpr int kMaxTokens = 512 / kGroups;
  static constexpr int kTileBytes = static_cast<int>(fp8_tile_bytes(kFormat));
  static constexpr int kTokenBytes = kMaxTokens * static_cast<int>(kSlabBytes);
  static constexpr int kOutBytes = kOutTokens * kOutPitch;  // of a group
  static constexpr int kStages = (216 * 1024 - kGroups * kOutBytes) / (kTokenBytes + kGroups * kTileBytes);
  // Stages that a group is behind the one before, so that they do not write their results out all at once.
  static constexpr int kLag = kGroups == 2 ? 3 : 1;
};

struct Args {
  Epilogue epilogue;
  int cols, row_tiles, slabs, num_experts;  // N of out; of the weights; of tokens and weights
  const uint8_t* weights;                   // [L] matrices
  int64_t matrix_bytes, factors_offset;
  const uint8_t* tokens;
  int64_t token_rows;  // of the slabs
  const float* token_scales;
  const float* scales;  // [L, 3]
  const float* bias;    // [L, cols], gated [L, 2, cols], or null
  Activation activation;
  DeviceRows rows;
  bf16* out;  // [max_rows, cols]
};

template <class C>
struct Shared {
  alignas(1024) uint8_t tokens[C::kStages][C::kTokenBytes];
  alignas(128) uint8_t weights[C::kStages][C::kGroups][C::kTileBytes];
  alignas(128) uint8_t out[C::kGroups][C::kOutBytes];
  uint2 table[128];  // by scale index: the e4m3 bytes of the eight magnitudes
  alignas(16) float token_scales[C::kGroups][C::kMaxTokens];
  uint64_t full[C::kStages], empty[C::kStages];
  int unit_start[1];  // [L + 1]: token tiles before each expert
};

// Of out, and of the slabs.
__device__ int64_t first_row(const Args& a, int expert) {
  return a.rows.capacity == 0 ? a.rows.offsets[expert] : expert * a.rows.capacity;
}
__device__ int64_t first_slab_row(const Args& a, int expert) {
  return slab_first_row(expert, first_row(a, expert), a.rows.capacity);
}

template <class C>
__device__ void load_stages(const Args& a, Shared<C>& shared, int num_units) {
  constexpr int kTileBytes = C::kTileBytes, kRowBytes = static_cast<int>(kSlabBytes);
  RingPlace<C::kStages> ring;
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  for (int u = blockIdx.x / kCluster; u < num_units; u += gridDim.x / kCluster) {
    const Unit unit = find_unit<C::kUnitTiles>(a.rows, a.row_tiles, a.num_experts, shared.unit_start, u);
    const int tokens = (unit.count + 7) / 8 * 8, half = (tokens / 2 + 7) / 8 * 8;
    const uint32_t bytes = (rank == 0 ? half : tokens - half) * kRowBytes;
    const uint8_t* x =
        a.tokens + (first_slab_row(a, unit.expert) + unit.first + rank * half) * int64_t{kRowBytes};
    const uint8_t* w[C::kGroups];
    uint32_t expected = tokens * kRowBytes;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const typename C::Part part(unit, rank * C::kGroups + g);
      w[g] = part.tile < 0 ? nullptr
                           : a.weights + unit.expert * a.matrix_bytes +
                                 fp8_tile_offset(C::kFormat, a.slabs, part.tile, 0);
      if (part.tile >= 0) expected += kTileBytes;
    }
    for (int k = 0; k < a.slabs; ++k, ring.next()) {
      uint64_t* full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, expected);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g)
        if (w[g] != nullptr)
          ptx::bulk_load(shared.weights[ring.slot][g], w[g] + int64_t{k} * kTileBytes, kTileBytes, full);
      if (bytes > 0)
        ptx::bulk_load_multicast(shared.tokens[ring.slot] + rank * half * kRowBytes,
                                 x + k * a.token_rows * kRowBytes, bytes, full, (1 << kCluster) - 1);
    }
  }
}

// d += a tokens, two k steps, by the instruction of 16 `n16` tokens, of kLow ... kHigh. All of them work on
// the same registers.
template <int kLow, int kHigh, int kCount>
__device__ __forceinline__ void add_steps(int n16, float (&d)[kCount], const uint32_t (&a)[2][4],
                                          uint64_t tokens) {
  if constexpr (kLow < kHigh) {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (n16 <= kMiddle)
      add_steps<kLow, kMiddle>(n16, d, a, tokens);
    else
      add_steps<kMiddle + 1, kHigh>(n16, d, a, tokens);
  } else {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 2; ++s) Wgmma<16 * kLow>::add_e4m3(d, a[s], wgmma_b_advance(tokens, 32 * s));
    wgmma_commit();
  }
}

// A warpgroup's sums over all of K. While the matrix unit works on half a slab, the next half is unpacked.
template <class C>
struct Sums {
  float d[C::kMaxTokens / 2];
  uint32_t a[2][2][4];
  int before = -1;  // the slot whose tokens may still be read
  int lag = 0;      // stages after which the next group may begin; the block's first unit only

  __device__ __forceinline__ void step(Shared<C>& shared, RingPlace<C::kStages>& ring, int n16, int first) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int slot = __shfl_sync(~0u, ring.slot, 0);  // tells the compiler that a warp's lanes agree
    ptx::mbarrier_wait(&shared.full[slot], ring.parity);
    Fp8TileWords<C::kFormat> words;
    words.load(shared.weights[slot][group], shared.table, warp, lane);
    const uint64_t tokens =
        wgmma_b_descriptor(ptx::shared_address(shared.tokens[slot]) + first * static_cast<int>(kSlabBytes));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        words.make(2 * half + s, a[half][s]);
        keep_registers(a[half][s]);  // ready before the fence, or wgmma would be serialised
      }
      add_steps<1, C::kMaxTokens / 16>(n16, d, a[half], wgmma_b_advance(tokens, 64 * half));
      wgmma_wait<1>();
      if (half == 0 && before >= 0) release_in_cluster(shared, before);
    }
    before = slot;
    ring.next();
    if (--lag == 0) start_next_group<C::kGroups>();
  }

  __device__ __forceinline__ void run(Shared<C>& shared, RingPlace<C::kStages>& ring, int slabs,
                                      const typename C::Part& part) {
    const int n16 = __shfl_sync(~0u, (part.count + 15) / 16, 0);
#pragma unroll
    for (int i = 0; i < C::kMaxTokens / 2; ++i) d[i] = 0;
    before = -1;
#pragma unroll 1
    for (int k = 0; k < slabs; ++k) step(shared, ring, n16, part.first);
    wgmma_wait<0>();
    keep_registers(d);
    release_in_cluster(shared, before);
  }
};

// What a part's sums are multiplied by and moved by: its rows g and g + 8, and the tokens thread + 128 i.
// Loaded before the sums are made, looked at after.
template <class C>
struct Factors {
  static constexpr int kTokens = C::kMaxTokens / 128;
  float row[2], tensor[2], bias[2] = {0, 0}, token[kTokens];

  __device__ Factors(const Args& a, const Unit& unit, const typename C::Part& part) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, in_tile = warp * 16 + g;
    const bool gated = a.epilogue == Epilogue::kGated;
    const auto* factors =
        reinterpret_cast<const float*>(a.weights + unit.expert * a.matrix_bytes + a.factors_offset) +
        part.tile * 64 + in_tile;
    row[0] = factors[0], row[1] = factors[8];
    const float* scales = a.scales + 3 * unit.expert;
    tensor[0] = scales[gated ? 0 : a.epilogue == Epilogue::kRelu2 ? 1 : 2];
    tensor[1] = gated ? scales[1] : tensor[0];
    const float* x_scales = a.token_scales + first_slab_row(a, unit.expert) + unit.first + part.first;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int t = threadIdx.x % 128 + 128 * i;
      token[i] = t < part.count ? x_scales[t] : 0;
    }
    if (a.bias == nullptr) return;
    const int col = gated ? part.tile * 32 + warp * 8 + g : part.tile * 64 + in_tile;
    const float* at = a.bias + int64_t{unit.expert} * (gated ? 2 : 1) * a.cols;
    if (col < a.cols) bias[0] = at[col];
    if (gated ? col < a.cols : col + 8 < a.cols) bias[1] = at[gated ? a.cols + col : col + 8];
  }
  __device__ __forceinline__ void put(float* token_scales) {
    row[0] *= tensor[0], row[1] *= tensor[1];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) token_scales[threadIdx.x % 128 + 128 * i] = token[i];
  }
  // token_scales: of the tokens that are staged.
  __device__ __forceinline__ void scale(const float* sums, const float* token_scales, int token,
                                        float (&v)[4]) const {
    const float2 t = *reinterpret_cast<const float2*>(token_scales + token);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(sums[i] * row[i / 2], i % 2 == 0 ? t.x : t.y, bias[i / 2]);
  }
};

// Staged tokens -> out: 16-byte pieces, kPieces a token. row: of out.
template <bool kGated>
__device__ __forceinline__ void store_out(const Args& a, int64_t row, int tile, int count,
                                          const uint8_t* staged) {
  constexpr int kPieces = kGated ? 4 : 8;
  const int thread = threadIdx.x % 128, piece = thread % kPieces, column = (tile * kPieces + piece) * 8;
  if (column >= a.cols) return;
  bf16* out = a.out + row * a.cols + column;
#pragma unroll 2
  for (int token = thread / kPieces; token < count; token += 128 / kPieces)
    *reinterpret_cast<uint4*>(out + int64_t{token} * a.cols) =
        *reinterpret_cast<const uint4*>(staged + token * kOutPitch + piece * 16);
}

template <bool kGated, class C>
__device__ __forceinline__ void finish(const Args& a, const Unit& unit, const typename C::Part& part,
                                       Factors<C>& factors, Shared<C>& shared,
                                       const float (&d)[C::kMaxTokens / 2]) {
  const int group = threadIdx.x / 128;
  uint8_t* out = shared.out[group];
  factors.put(shared.token_scales[group]);
  const int64_t row = first_row(a, unit.expert) + unit.first + part.first;
#pragma unroll
  for (int first = 0; first < C::kMaxTokens; first += kOutTokens) {
    if (first >= part.count) break;
    ptx::named_barrier(1 + group, 128);  // the factors are there, and what was staged is stored
    const auto scaled = [&](const float* sums, int token, float(&v)[4]) {
      factors.scale(sums, shared.token_scales[group] + first, token, v);
    };
    stage_out<kGated>(a.activation, a.epilogue == Epilogue::kRelu2, scaled, d + first / 2, out);
    ptx::named_barrier(1 + group, 128);
    store_out<kGated>(a, row + first, part.tile, min(kOutTokens, part.count - first), out);
  }
}

template <class C>
__device__ void consume(const Args& a, Shared<C>& shared, int num_units) {
  RingPlace<C::kStages> ring;
  const int group = threadIdx.x / 128, place = static_cast<int>(ptx::cluster_ctarank()) * C::kGroups + group;
  const int first_unit = blockIdx.x / kCluster;
  for (int u = first_unit; u < num_units; u += gridDim.x / kCluster) {
    const Unit unit = find_unit<C::kUnitTiles>(a.rows, a.row_tiles, a.num_experts, shared.unit_start, u);
    const typename C::Part part(unit, place);
    Sums<C> sums;
    if (u == first_unit) {
      wait_for_group_before<C::kGroups>();
      sums.lag = C::kLag < a.slabs ? C::kLag : 1;
      if (part.tile < 0) start_next_group<C::kGroups>();
    }
    if (part.tile < 0) {
      skip_stages(shared, ring, a.slabs);
      continue;
    }
    Factors<C> factors(a, unit, part);
    sums.run(shared, ring, a.slabs, part);
    if (a.epilogue == Epilogue::kGated)
      finish<true>(a, unit, part, factors, shared, sums.d);
    else
      finish<false>(a, unit, part, factors, shared, sums.d);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) expert_gemm_fp8(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 32) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], C::kUnitTiles * 4);
    }
    ptx::mbarrier_init_fence();
  }
  auto* table = reinterpret_cast<uint8_t*>(shared.table);
  for (int i = threadIdx.x; i < 128 * 8; i += C::kThreads)
    table[i] = fp8_operand_byte<C::kFormat>(i / 8, i % 8);
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (threadIdx.x < 32) count_tiles(a.rows, a.num_experts, C::kMaxTokens, shared.unit_start);
  __syncthreads();
  ptx::cluster_sync();
  const int num_units =
      shared.unit_start[a.num_experts] * ((a.row_tiles + C::kUnitTiles - 1) / C::kUnitTiles);
  if (threadIdx.x >= C::kGroups * 128) {
    ptx::lower_registers<C::kProducerRegs>();
    if (threadIdx.x == C::kGroups * 128) load_stages(a, shared, num_units);
  } else {
    ptx::raise_registers<C::kConsumerRegs>();
    consume(a, shared, num_units);
  }
  ptx::cluster_sync();  // nobody signals a block that is gone
}

template <class C>
void launch_gemm(const Args& a) {
  const size_t bytes = sizeof(Shared<C>) + sizeof(int) * a.num_experts;
  static_assert(sizeof(Shared<C>) + sizeof(int) * kFp8MaxExperts <= 232448);
  static const cudaError_t allowed =
      cudaFuncSetAttribute(expert_gemm_fp8<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           device_limits().shared_bytes_per_block);
  static_cast<void>(allowed);  // if it was refused, every launch says so
  const auto blocks = static_cast<unsigned>(device_limits().num_sms / kCluster * kCluster);
  launch("expert_gemm_fp8", expert_gemm_fp8<C>, {blocks, C::kThreads, bytes, kCluster}, a);
}

// Measured on an H200: up to so many rows an expert, four warpgroups with 128 tokens are the faster.
constexpr int64_t kFewRows = 140;

template <Fp4Format kFormat>
void launch_gemm(const Args& a, int64_t expected_rows) {
  if (expected_rows <= kFewRows)
    launch_gemm<Config<kFormat, 4>>(a);
  else
    launch_gemm<Config<kFormat, 2>>(a);
}

// The GEMM of x with the matrices [weight_rows, x.cols] of every expert.
void gemm(const DeviceExpertArgs& args, const ActRows& x, int64_t weight_rows, Args a) {
  const TiledExperts& e = args.experts;
  FP4MOE_CHECK(e.num_experts <= kFp8MaxExperts && x.dtype == DType::kF8E4M3 && !args.gather,
               "expert rows that the FP8 GEMMs do not take");
  a.row_tiles = static_cast<int>(fp8_row_tiles(weight_rows));
  a.slabs = static_cast<int>(num_slabs(x.cols));
  a.num_experts = static_cast<int>(e.num_experts);
  a.matrix_bytes = fp8_tiled_bytes(e.format, weight_rows, x.cols);
  a.factors_offset = fp8_row_factors_offset(e.format, weight_rows, x.cols);
  a.tokens = static_cast<const uint8_t*>(x.data);
  a.token_rows = x.rows;
  a.scales = e.scales;
  a.activation = e.activation;
  a.rows = args.rows;
  const int64_t expected = args.expected_rows > 0 ? args.expected_rows : args.rows.max_rows / e.num_experts;
  if (e.format == Fp4Format::kMxfp4)
    launch_gemm<Fp4Format::kMxfp4>(a, expected);
  else
    launch_gemm<Fp4Format::kNvfp4>(a, expected);
}

}  // namespace
}  // namespace fp8

void sm90_fp8_gate_up(const DeviceExpertArgs& args) {
  if (args.rows.max_rows == 0) return;
  const TiledExperts& e = args.experts;
  const bool gated = is_gated(e.activation.kind);
  fp8::Args a = {};
  a.epilogue = gated ? sm90::Epilogue::kGated : sm90::Epilogue::kRelu2;
  a.cols = static_cast<int>(e.intermediate_size);
  a.weights = e.gate_up;
  a.token_scales = args.x_row_scales;
  a.bias = e.gate_up_bias;
  a.out = static_cast<bf16*>(args.intermediate.data);
  fp8::gemm(args, args.x, (gated ? 2 : 1) * e.intermediate_size, a);
}

void sm90_fp8_down(const DeviceExpertArgs& args) {
  if (args.rows.max_rows == 0) return;
  const TiledExperts& e = args.experts;
  fp8::Args a = {};
  a.epilogue = sm90::Epilogue::kDown;
  a.cols = static_cast<int>(e.hidden_size);
  a.weights = e.down;
  a.token_scales = args.h_row_scales;
  a.bias = e.down_bias;
  a.out = args.y_bf16;
  fp8::gemm(args, args.h, e.hidden_size, a);
}

}  // namespace fp4moe
