// Computes  the expert GEMMs of w4a8, see kernels/device_moe_fp8.h: out[row, n] = sum over k of
//           x[row, k] w[expert, n, k], then gate/up's activation or down's bias.
// Shapes    weights in tiles, tokens in slabs (fp8_tile_layout.h); out bf16 [max_rows, I] or [max_rows, H].
//           A unit is 256 weight rows x up to 128 tokens of one expert x all of K.
// Bytes     weights once from HBM (the token tiles of an expert are neighbours in the work list), tokens
//           once for each 256 weight rows, from L2.
// Flops     2 rows N K. Bound: below some 150 tokens an expert the weight bytes, above it the FP8 rate.
// Launch    persistent, one block of 384 threads an SM: two warpgroups that multiply, and one of which one
//           thread keeps a ring of bulk copies full. Units are dealt in turns; blocks share nothing, so none
//           waits for another.
// Numerics  weights are the A operand, made in registers: a byte permute picks a magnitude's e4m3 byte from
//           the eight of its scale (a table in shared memory), some 1.3 instructions a weight. The matrix
//           unit adds in ascending K with about 14 bits: relative L2 1.4e-3 at K = 2880, beside 4e-2 of the
//           FP8 tokens; adding sums of 128 columns in f32 instead made that 5e-4 and cost 7 to 10 %. Same
//           bits on every run.
// Measured  H200, MXFP4, gate/up: 1033 TFLOP/s on 65536 rows of 32 experts (H 7168, I 2048), 817 on 32768
//           rows of 128 (2880, 2880). Without unpacking it is 1310: the pipe of logic and shifts and the
//           table's reads are what is in the way.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "base/check.h"
#include "device/stream.h"
#include "formats/e4m3.h"
#include "kernels/cuda/fp8_tile_layout.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx_mma.cuh"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/wgmma_fp8.cuh"
#include "kernels/cuda/work_list.cuh"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace {

constexpr int kGroups = 2;  // warpgroups that multiply: two row tiles each
constexpr int kMaxTokens = 128;
constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kTokenBytes = kMaxTokens * 128;  // of a stage
constexpr int kTokenGroup = 16;                // token tiles that share weight rows before the next rows come
constexpr int kOutPitch = 144;  // of a token on its way out: 64 columns of bf16, and room against
                                // bank conflicts

enum class Epilogue : uint8_t { kGated, kRelu2, kDown };

struct GemmArgs {
  const uint8_t* weights;  // [L] matrices
  int64_t matrix_bytes, factors_offset;
  int weight_rows, slabs, num_experts;
  const uint8_t* x;  // slabs
  int64_t slab_rows;
  const float* x_scales;
  DeviceRows rows;
  const float* scales;  // [L, 3]
  const float* bias;
  Activation activation;
  int cols;   // of out: I or H
  bf16* out;  // [max_rows, cols]
};

template <Fp4Format format>
struct Config {
  static constexpr Fp4Format kFormat = format;
  static constexpr int kTileBytes = static_cast<int>(fp8_tile_bytes(format));
  static constexpr int kWeightBytes = 4 * kTileBytes;
  static constexpr int kStages = 5;
};

template <class C>
struct Shared {
  alignas(1024) uint8_t weights[C::kStages][C::kWeightBytes];
  alignas(1024) uint8_t tokens[C::kStages][kTokenBytes];
  alignas(128) uint8_t out[kGroups][kMaxTokens * kOutPitch];
  uint2 table[128];  // by scale index: the e4m3 bytes of the eight magnitudes
  alignas(16) float row_factors[kGroups][128], row_biases[kGroups][128], token_scales[kGroups][kMaxTokens];
  uint64_t full[C::kStages], empty[C::kStages];
  int unit_start[kFp8MaxExperts + 1];
};

struct Unit {
  int expert, row_group;  // of 256 weight rows
  int first, count;       // tokens of the expert
};

// Token tiles of an expert with `rows` rows, and how many tokens each has.
__device__ int token_tiles(int rows) { return (rows + kMaxTokens - 1) / kMaxTokens; }
__device__ int tile_tokens(int rows, int tiles) { return ((rows + tiles - 1) / tiles + 7) / 8 * 8; }

// Units before each expert. One warp.
__device__ void count_units(const GemmArgs& a, int* unit_start) {
  const int row_groups = (a.weight_rows + 255) / 256, lane = threadIdx.x % 32;
  int total = 0;
  for (int first = 0; first < a.num_experts; first += 32) {
    const int e = first + lane, units = e < a.num_experts ? token_tiles(a.rows.counts[e]) * row_groups : 0;
    int sum = units;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (e < a.num_experts) unit_start[e] = total + sum - units;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) unit_start[a.num_experts] = total;
}

// Expert by expert; within one, groups of token tiles, then weight rows, then token tiles.
__device__ Unit find_unit(const GemmArgs& a, const int* unit_start, int index) {
  const int e = expert_at(unit_start, a.num_experts, index);
  const int row_groups = (a.weight_rows + 255) / 256, within = index - unit_start[e];
  const int rows = a.rows.counts[e], tiles = token_tiles(rows), tokens = tile_tokens(rows, tiles);
  const int group = within / (kTokenGroup * row_groups), rest = within % (kTokenGroup * row_groups);
  const int group_tiles = min(kTokenGroup, tiles - group * kTokenGroup);
  const int first = (group * kTokenGroup + rest % group_tiles) * tokens;
  return {e, rest / group_tiles, first, min(tokens, rows - first)};
}

__device__ int64_t first_slab_row(const GemmArgs& a, const Unit& unit) {
  const int64_t packed = a.rows.capacity == 0 ? a.rows.offsets[unit.expert] : 0;
  return slab_first_row(unit.expert, packed, a.rows.capacity) + unit.first;
}

// fp8_operand() on the device.
template <Fp4Format format>
__device__ uint8_t operand_byte(int index, int magnitude) {
  const float value = magnitude < 4   ? 0.5f * magnitude
                      : magnitude < 6 ? magnitude - 2.0f
                                      : 2.0f * magnitude - 8;
  if (format == Fp4Format::kNvfp4)
    return e4m3_encode(value * e4m3_decode(static_cast<uint8_t>(index)) * 0.125f);
  return index <= kFp8MxTop - kFp8MxBottom ? e4m3_encode(ldexpf(value, kFp8MxBottom + index)) : uint8_t{0};
}

template <class C>
__device__ void load_stages(const GemmArgs& a, Shared<C>& shared) {
  RingPlace<C::kStages> ring;
  const int row_tiles = static_cast<int>(fp8_row_tiles(a.weight_rows));
  for (int u = blockIdx.x; u < shared.unit_start[a.num_experts]; u += gridDim.x) {
    const Unit unit = find_unit(a, shared.unit_start, u);
    const uint32_t weight_bytes = min(4, row_tiles - 4 * unit.row_group) * C::kTileBytes;
    const uint32_t token_bytes = (unit.count + 7) / 8 * 8 * 128;
    const uint8_t* w =
        a.weights + unit.expert * a.matrix_bytes + int64_t{unit.row_group} * 4 * a.slabs * C::kTileBytes;
    const uint8_t* x = a.x + first_slab_row(a, unit) * 128;
    for (int k = 0; k < a.slabs; ++k, ring.next()) {
      uint64_t* full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, weight_bytes + token_bytes);
      ptx::bulk_load(shared.weights[ring.slot], w + int64_t{k} * weight_bytes, weight_bytes, full);
      ptx::bulk_load(shared.tokens[ring.slot], x + k * a.slab_rows * 128, token_bytes, full);
    }
  }
}

// Eight codes of one word under one scale (kMxfp4) or two: the e4m3 bytes of the first and the last four.
__device__ void unpack(uint32_t word, uint2 first_table, uint2 last_table, uint32_t& first, uint32_t& last) {
  const uint32_t magnitudes = word & 0x77777777u;
  first = __byte_perm(first_table.x, first_table.y, magnitudes) | (word & 0x80808080u);
  last = __byte_perm(last_table.x, last_table.y, magnitudes >> 16) | (word << 4 & 0x80808080u);
}

// A row tile's 128 columns as the A operands of four steps.
template <Fp4Format format>
__device__ void make_operands(const uint8_t* tile, const uint2* table, uint32_t (&a)[4][4]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const auto* codes = reinterpret_cast<const uint4*>(tile) + warp * 64 + lane;
  const uint4 pairs[2] = {codes[0], codes[32]};
  const uint8_t* scales = tile + kFp8CodeBytes;
  uint32_t indices[4];
  if constexpr (format == Fp4Format::kMxfp4) {
    const uint2 s = reinterpret_cast<const uint2*>(scales)[warp * 8 + lane / 4];
    indices[0] = s.x, indices[1] = s.y;
  } else {
    const uint4 s = reinterpret_cast<const uint4*>(scales)[warp * 8 + lane / 4];
    indices[0] = s.x, indices[1] = s.y, indices[2] = s.z, indices[3] = s.w;
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(table);
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 pair = pairs[step / 2];
      const uint32_t word = step % 2 == 0 ? (half == 0 ? pair.x : pair.y) : (half == 0 ? pair.z : pair.w);
      if constexpr (format == Fp4Format::kMxfp4) {
        // The mask keeps what a missing row tile leaves here aligned.
        const uint32_t at = indices[step / 2] >> (step % 2 * 16 + half * 8) & 0xf8;
        const uint2 t = *reinterpret_cast<const uint2*>(bytes + at);
        unpack(word, t, t, a[step][half], a[step][2 + half]);
      } else {
        const uint32_t first = indices[step] >> (half * 8) & 0xff,
                       last = indices[step] >> (16 + half * 8) & 0xff;
        unpack(word, table[first], table[last], a[step][half], a[step][2 + half]);
      }
    }
}

// The sums of a warpgroup: two row tiles times `width` tokens. While the matrix unit works on one row tile,
// the operands of the other are made; it is never without work until the last slab.
template <class C, int width>
struct Sums {
  float d[2][width / 2];
  uint32_t a[2][4][4];

  __device__ void multiply(int tile, uint64_t tokens) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_e4m3<width>(d[tile], a[tile][step], tokens + 2 * step);
    wgmma_commit();
  }

  __device__ void run(int slabs, Shared<C>& shared, RingPlace<C::kStages>& ring) {
    const int first_tile = threadIdx.x / 128 * 2 * C::kTileBytes;
#pragma unroll
    for (int i = 0; i < width / 2; ++i) d[0][i] = d[1][i] = 0;
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    make_operands<C::kFormat>(shared.weights[ring.slot] + first_tile, shared.table, a[0]);
    int before = -1;  // the slot whose tokens are still being read
    for (int k = 0; k < slabs; ++k) {
      const int slot = ring.slot;
      const uint64_t tokens = wgmma_b_descriptor(ptx::shared_address(shared.tokens[slot]));
      multiply(0, tokens);
      wgmma_wait<1>();
      if (before >= 0) release(&shared.empty[before]);
      before = slot;
      make_operands<C::kFormat>(shared.weights[slot] + first_tile + C::kTileBytes, shared.table, a[1]);
      multiply(1, tokens);
      wgmma_wait<1>();
      ring.next();
      if (k + 1 == slabs) break;
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
      make_operands<C::kFormat>(shared.weights[ring.slot] + first_tile, shared.table, a[0]);
    }
    wgmma_wait<0>();
    keep_registers(d[0]);
    keep_registers(d[1]);
    release(&shared.empty[before]);
  }

  // All of the warp have read the slot.
  static __device__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
  }
};

// Comparisons let a NaN pass.
__device__ float activate(const Activation& activation, float gate, float up) {
  if (activation.kind == ActivationKind::kSilu) return __fdividef(gate, 1 + __expf(-gate)) * up;
  const float limit = activation.limit;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return __fdividef(gate, 1 + __expf(-activation.alpha * gate)) * (up + activation.beta);
}
__device__ float relu2(float v) { return v < 0 ? 0 : v * v; }

// What a warpgroup's 128 weight rows and the tokens are multiplied by, into shared memory.
template <Epilogue epilogue, class C>
__device__ void load_factors(const GemmArgs& a, const Unit& unit, Shared<C>& shared) {
  const int group = threadIdx.x / 128, t = threadIdx.x % 128, row = unit.row_group * 256 + group * 128 + t;
  float factor = 0, bias = 0;
  if (row < a.weight_rows) {
    const auto* factors =
        reinterpret_cast<const float*>(a.weights + unit.expert * a.matrix_bytes + a.factors_offset);
    int which = epilogue == Epilogue::kDown ? 2 : 1, col = row, cols = a.cols;
    if constexpr (epilogue == Epilogue::kGated) {
      which = row % 16 / 8;
      col = which * a.cols + row / 64 * 32 + row % 64 / 16 * 8 + row % 8;
      cols = 2 * a.cols;
    }
    factor = factors[row] * a.scales[unit.expert * 3 + which];
    if (a.bias != nullptr) bias = a.bias[int64_t{unit.expert} * cols + col];
  }
  shared.row_factors[group][t] = factor;
  shared.row_biases[group][t] = bias;
  shared.token_scales[group][t] = t < unit.count ? a.x_scales[first_slab_row(a, unit) + t] : 0;
}

// What a thread's rows g and g + 8 of a row tile are multiplied by and moved by.
struct RowFactors {
  float factor[2], bias[2];
  template <class C>
  __device__ RowFactors(const Shared<C>& shared, int tile) {
    const int group = threadIdx.x / 128, row = tile * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    factor[0] = shared.row_factors[group][row], factor[1] = shared.row_factors[group][row + 8];
    bias[0] = shared.row_biases[group][row], bias[1] = shared.row_biases[group][row + 8];
  }
  __device__ float of(float sum, int half, float token_scale) const {
    return fmaf(sum * factor[half], token_scale, bias[half]);
  }
};

// One row tile's outputs, in bf16, into `out`: [tokens] rows of kOutPitch bytes, gated: 32 columns of the 64.
template <Epilogue epilogue, class C, int width>
__device__ void stage_tile(const GemmArgs& a, const Shared<C>& shared, const float (&d)[width / 2], int tile,
                           uint8_t* out) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const RowFactors rows(shared, tile);
  constexpr bool gated = epilogue == Epilogue::kGated;
  constexpr int kBlocks = gated ? 4 : 2;  // of eight tokens at once
  const int column = gated ? tile * 64 + warp * 16 : warp * 32 + lane / 8 % 2 * 16;
  uint8_t* to = out + ((gated ? lane / 8 : lane / 16) * 8 + lane % 8) * kOutPitch + column;
#pragma unroll
  for (int first = 0; first < width / 8; first += kBlocks) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int n = first + i;
      const auto scales = *reinterpret_cast<const float2*>(&shared.token_scales[group][n * 8 + lane % 4 * 2]);
      const float v00 = rows.of(d[4 * n], 0, scales.x), v01 = rows.of(d[4 * n + 1], 0, scales.y);
      const float v10 = rows.of(d[4 * n + 2], 1, scales.x), v11 = rows.of(d[4 * n + 3], 1, scales.y);
      if constexpr (gated) {
        pairs[i] = ptx::bf16_pair(activate(a.activation, v00, v10), activate(a.activation, v01, v11));
      } else if constexpr (epilogue == Epilogue::kDown) {
        pairs[2 * i] = ptx::bf16_pair(v00, v01), pairs[2 * i + 1] = ptx::bf16_pair(v10, v11);
      } else {
        pairs[2 * i] = ptx::bf16_pair(relu2(v00), relu2(v01)),
                  pairs[2 * i + 1] = ptx::bf16_pair(relu2(v10), relu2(v11));
      }
    }
    ptx::store_transposed(to + first * 8 * kOutPitch, pairs);
  }
}

// 64 staged columns from `column` on, of the tokens that the unit has.
__device__ void store_tokens(const GemmArgs& a, const Unit& unit, const uint8_t* staged, int column) {
  const int64_t start = a.rows.capacity == 0 ? a.rows.offsets[unit.expert] : unit.expert * a.rows.capacity;
  const int piece = threadIdx.x % 8;
  if (column + piece * 8 >= a.cols) return;
  bf16* out = a.out + (start + unit.first) * a.cols + column + piece * 8;
#pragma unroll 4
  for (int token = threadIdx.x % 128 / 8; token < unit.count; token += 16)
    *reinterpret_cast<uint4*>(out + int64_t{token} * a.cols) =
        *reinterpret_cast<const uint4*>(staged + token * kOutPitch + piece * 16);
}

template <Epilogue epilogue, class C, int width>
__device__ void run_unit(const GemmArgs& a, const Unit& unit, Shared<C>& shared,
                         RingPlace<C::kStages>& ring) {
  Sums<C, width> sums;
  load_factors<epilogue>(a, unit, shared);
  sums.run(a.slabs, shared, ring);
  const int group = threadIdx.x / 128, half = unit.row_group * kGroups + group;
  uint8_t* out = shared.out[group];
  constexpr int kTiles = epilogue == Epilogue::kGated ? 2 : 1;  // that fill 64 columns of out
#pragma unroll
  for (int tile = 0; tile < 2; tile += kTiles) {
    ptx::named_barrier(1 + group, 128);  // the factors are there, and what was staged is stored
#pragma unroll
    for (int i = tile; i < tile + kTiles; ++i) stage_tile<epilogue, C, width>(a, shared, sums.d[i], i, out);
    ptx::named_barrier(1 + group, 128);
    store_tokens(a, unit, out, (half * 2 + tile) / kTiles * 64);
  }
}

template <Fp4Format format, Epilogue epilogue>
__global__ void __launch_bounds__(kThreads, 1) expert_gemm_fp8(const __grid_constant__ GemmArgs a) {
  using C = Config<format>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x < 32) count_units(a, shared.unit_start);
  if (threadIdx.x == 32) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kGroups * 4);
    }
    ptx::mbarrier_init_fence();
  }
  auto* table = reinterpret_cast<uint8_t*>(shared.table);
  for (int i = threadIdx.x; i < 128 * 8; i += kThreads) table[i] = operand_byte<format>(i / 8, i % 8);
  __syncthreads();
  if (threadIdx.x >= kGroups * 128) {
    ptx::lower_registers<24>();
    if (threadIdx.x == kGroups * 128) load_stages(a, shared);
    return;
  }
  ptx::raise_registers<240>();
  RingPlace<C::kStages> ring;
  for (int u = blockIdx.x; u < shared.unit_start[a.num_experts]; u += gridDim.x) {
    const Unit unit = find_unit(a, shared.unit_start, u);
    if (unit.count <= 32)
      run_unit<epilogue, C, 32>(a, unit, shared, ring);
    else if (unit.count <= 64)
      run_unit<epilogue, C, 64>(a, unit, shared, ring);
    else if (unit.count <= 96)
      run_unit<epilogue, C, 96>(a, unit, shared, ring);
    else
      run_unit<epilogue, C, 128>(a, unit, shared, ring);
  }
}

template <Fp4Format format, Epilogue epilogue>
void launch(const GemmArgs& a) {
  constexpr int kBytes = sizeof(Shared<Config<format>>);
  static_assert(kBytes <= 232448);
  static const cudaError_t allowed = cudaFuncSetAttribute(
      expert_gemm_fp8<format, epilogue>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  static_cast<void>(allowed);  // if it was refused, every launch says so
  Stream& stream = current_stream();
  expert_gemm_fp8<format, epilogue><<<device_limits().num_sms, kThreads, kBytes, stream.handle()>>>(a);
  stream.check_launch("expert_gemm_fp8");
}

template <Epilogue epilogue>
void launch(Fp4Format format, const GemmArgs& a) {
  if (format == Fp4Format::kMxfp4)
    launch<Fp4Format::kMxfp4, epilogue>(a);
  else
    launch<Fp4Format::kNvfp4, epilogue>(a);
}

GemmArgs gemm_args(const DeviceExpertArgs& args, const ActRows& x, int64_t weight_rows) {
  const TiledExperts& e = args.experts;
  FP4MOE_CHECK(e.num_experts <= kFp8MaxExperts && x.dtype == DType::kF8E4M3 && !args.gather,
               "expert rows that the FP8 GEMMs do not take");
  GemmArgs a = {};
  a.matrix_bytes = fp8_tiled_bytes(e.format, weight_rows, x.cols);
  a.factors_offset = fp8_row_factors_offset(e.format, weight_rows, x.cols);
  a.weight_rows = static_cast<int>(weight_rows);
  a.slabs = static_cast<int>(num_slabs(x.cols));
  a.num_experts = static_cast<int>(e.num_experts);
  a.x = static_cast<const uint8_t*>(x.data);
  a.slab_rows = x.rows;
  a.rows = args.rows;
  a.scales = e.scales;
  a.activation = e.activation;
  return a;
}

}  // namespace

void sm90_fp8_gate_up(const DeviceExpertArgs& args) {
  if (args.rows.max_rows == 0) return;
  const TiledExperts& e = args.experts;
  const bool gated = is_gated(e.activation.kind);
  GemmArgs a = gemm_args(args, args.x, (gated ? 2 : 1) * e.intermediate_size);
  a.weights = e.gate_up;
  a.x_scales = args.x_row_scales;
  a.bias = e.gate_up_bias;
  a.cols = static_cast<int>(e.intermediate_size);
  a.out = static_cast<bf16*>(args.intermediate.data);
  if (gated)
    launch<Epilogue::kGated>(e.format, a);
  else
    launch<Epilogue::kRelu2>(e.format, a);
}

void sm90_fp8_down(const DeviceExpertArgs& args) {
  if (args.rows.max_rows == 0) return;
  GemmArgs a = gemm_args(args, args.h, args.experts.hidden_size);
  a.weights = args.experts.down;
  a.x_scales = args.h_row_scales;
  a.bias = args.experts.down_bias;
  a.cols = static_cast<int>(args.experts.hidden_size);
  a.out = args.y_bf16;
  launch<Epilogue::kDown>(args.experts.format, a);
}

}  // namespace fp4moe
