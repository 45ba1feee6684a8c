// Computes  the expert GEMMs of w4a8 (see kernels/device_moe_fp8.h): out[row, n] = sum over k of x[row, k]
//           w[expert, n, k], plus the bias, then gate/up's activation.
// Shapes    weights in tiles, tokens in slabs (fp8_tile_layout.h); out bf16 [max_rows, I] or [max_rows, H]. A
//           unit is 4 row tiles (256 weight rows) x up to 256 tokens of one expert x all of K; or 6 row tiles
//           x 160 tokens, or 8 x 96.
// Bytes     weights once from HBM (the token tiles of an expert are neighbours in the work list), tokens once
//           for each 256 to 512 weight rows, from L2.
// Flops     2 rows N K, with a unit's tokens padded to a multiple of 16.
// Bound     the FP8 rate; below about 100 tokens per expert, the weight bytes.
// Launch    persistent clusters of two blocks, which share a unit's tokens: each fetches half of them for
//           both blocks. A block has two to four warpgroups that multiply, each with one row tile, a thread
//           that loads and a thread that finds units ahead. Units are assigned round-robin.
// Numerics  weights are the A operand, made in registers: a byte permute picks a magnitude's e4m3 byte from
//           the eight bytes of its scale (a table in shared memory), with about 0.9 instructions per weight.
//           The matrix unit adds in ascending K with about 14 bits: relative L2 error 1.4e-3 at K = 2880,
//           compared with 4e-2 from the FP8 tokens; adding sums of 128 columns in f32 instead reduced it to
//           5e-4 and cost 7 to 10 % of the speed. Same bits on every run.
// Measured  H200, MXFP4, gate/up: 1384 TFLOP/s on 65536 rows of 32 experts (H 7168, I 2048), 1018 on 32768
//           rows of 128 experts (2880, 2880), 925 on 16384 rows and 569 on 8192. Even at 16 rows per expert,
//           a slab takes 780 cycles with two warpgroups and 925 with three, 1.8 and 1.4 times as long as its
//           bytes take: a warpgroup waits, reads shared memory, unpacks and issues in sequence.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "base/check.h"
#include "kernels/cuda/experts/fp4_to_fp8.cuh"
#include "kernels/cuda/experts/sm90_expert_work_fp8.cuh"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/device_moe_fp8.h"

namespace fp4moe {
namespace fp8 {
namespace {

// Factors and biases for the sums of a thread's rows g and g + 8. They are loaded before the sums are
// computed, and multiplied together afterwards.
struct RowFactors {
  float row[2];
  TileRows rows;

  __device__ RowFactors(const Args& a, int expert, int tile)
      : row{factors_of(a, expert, tile)[0], factors_of(a, expert, tile)[8]},
        rows(a.epilogue, a.scales, a.bias, a.cols, expert, tile) {}
  // Returns the row factors of the tile, beginning at the thread's row g.
  static __device__ const float* factors_of(const Args& a, int expert, int tile) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    return reinterpret_cast<const float*>(a.weights + expert * a.matrix_bytes + a.factors_offset) +
           tile * 64 + warp * 16 + g;
  }
  __device__ __forceinline__ void multiply() { row[0] *= rows.scale[0], row[1] *= rows.scale[1]; }
  __device__ __forceinline__ void scale(const float* sums, float2 token_scales, float (&v)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = fmaf(sums[i] * row[i / 2], i % 2 == 0 ? token_scales.x : token_scales.y, rows.bias[i / 2]);
  }
};

// Copies staged tokens to out, which points to the warp's first column of the first token. room: number of
// columns of out from there on.
template <bool kGated, int kPitch>
__device__ __forceinline__ void store_out(bf16* out, int cols, int room, int count, const uint8_t* staged) {
  constexpr int kPieces = kGated ? 1 : 2;  // 16-byte pieces per token
  const int lane = threadIdx.x % 32, piece = lane % kPieces;
  if (piece * 8 >= room) return;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int token = i * (32 / kPieces) + lane / kPieces;
    if (token < count)
      *reinterpret_cast<uint4*>(out + int64_t{token} * cols + piece * 8) =
          *reinterpret_cast<const uint4*>(staged + token * kPitch + piece * 16);
  }
}

// The tokens of a unit, and the warp's buffer for their outputs.
struct UnitTokens {
  int64_t out_row;
  const float* scales;
  uint8_t* staged;
};

// Finishes a part's sums and stores the results. Each warp works independently.
template <bool kGated, class C>
__device__ __forceinline__ void finish(const Args& a, const UnitTokens& tokens, const typename C::Part& part,
                                       RowFactors& rows, const float (&d)[C::kMaxTokens / 2]) {
  const int column = (part.tile * 4 + static_cast<int>(threadIdx.x) / 32 % 4) * (kGated ? 8 : 16);
  bf16* out = a.out + (tokens.out_row + part.first) * a.cols + column;
  constexpr int kPitch = kGated ? 16 : C::kOutPitch;
  rows.multiply();
#pragma unroll
  for (int first = 0; first < C::kMaxTokens; first += kOutTokens) {
    if (first >= part.count) break;
    const auto scaled = [&](const float* sums, int token, float(&v)[4]) {
      rows.scale(sums, *reinterpret_cast<const float2*>(tokens.scales + part.first + first + token), v);
    };
    stage_out<kGated, kPitch>(a.activation, a.epilogue == Epilogue::kRelu2, scaled, d + first / 2,
                              tokens.staged);
    __syncwarp();
    store_out<kGated, kPitch>(out + int64_t{first} * a.cols, a.cols, a.cols - column, part.count - first,
                              tokens.staged);
    __syncwarp();
  }
}

template <class C>
__device__ void consume(const Args& a, Shared<C>& shared) {
  RingPlace<C::kStages> ring;
  RingPlace<kWorks> place;
  const int group = threadIdx.x / 128;
  for (bool is_first = true;; place.next(), is_first = false) {
    ptx::mbarrier_wait(&shared.work_full[place.slot], place.parity);
    const Work<C>& work = shared.works[place.slot];
    if (work.expert < 0) return;
    const typename C::Part part = work.parts[group];
    SlabSums<C> sums;
    if (is_first) {
      wait_for_group_before<C::kGroups>();
      sums.lag = C::kLag < a.slabs ? C::kLag : 1;
      if (part.tile < 0) start_next_group<C::kGroups>();
    }
    if (part.tile < 0) {
      skip_stages(shared, ring, a.slabs);
    } else {
      RowFactors rows(a, work.expert, part.tile);
      sums.multiply_tiles(shared, ring, a.slabs, part.first, part.count);
      const UnitTokens tokens{work.out_row, shared.token_scales[place.slot], shared.out[threadIdx.x / 32]};
      if (a.epilogue == Epilogue::kGated)
        finish<true, C>(a, tokens, part, rows, sums.d);
      else
        finish<false, C>(a, tokens, part, rows, sums.d);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.work_empty[place.slot]);
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
    for (int i = 0; i < kWorks; ++i) {
      ptx::mbarrier_init(&shared.work_full[i], 1);
      ptx::mbarrier_init(&shared.work_empty[i], C::kGroups * 4 + 1);
    }
    ptx::mbarrier_init_fence();
  }
  auto* table = reinterpret_cast<uint8_t*>(shared.table);
  for (int i = threadIdx.x; i < 128 * 8; i += C::kThreads)
    table[i] = fp8_operand_byte<C::kFormat>(i / 8, i % 8);
  ptx::grid_dependency_wait();
  ptx::grid_dependents_launch();
  if (threadIdx.x < 32) count_tiles(a.rows, a.num_experts, C::kMaxTokens, shared.tile_start);
  __syncthreads();
  ptx::cluster_sync();
  if (threadIdx.x >= C::kGroups * 128) {
    ptx::lower_registers<C::kProducerRegs>();
    if (threadIdx.x == C::kGroups * 128) load_stages(a, shared);
    if (threadIdx.x == C::kGroups * 128 + 32) schedule(a, shared);
  } else {
    ptx::raise_registers<C::kConsumerRegs>();
    consume(a, shared);
  }
  ptx::cluster_sync();  // no block may signal a block that has exited
}

template <class C>
void launch_gemm(const Args& a) {
  const size_t bytes = sizeof(Shared<C>) + sizeof(int) * a.num_experts;
  static_assert(sizeof(Shared<C>) + sizeof(int) * kFp8MaxExperts <= 232448);
  prepare_kernel(expert_gemm_fp8<C>, {.shared_bytes = device_limits().shared_bytes_per_block});
  const auto blocks = static_cast<unsigned>(device_limits().num_sms / kCluster * kCluster);
  launch("expert_gemm_fp8", expert_gemm_fp8<C>, {blocks, C::kThreads, bytes, kCluster}, a);
}

// Numbers of rows per expert up to which four warpgroups with 96 tokens, and three with 160, are the fastest
// on an H200. For down, three are the fastest with any larger number, too.
constexpr int64_t kFewestRows = 72, kFewRows = 140;

template <Fp4Format kFormat>
void launch_gemm(const Args& a, int64_t expected_rows) {
  if (expected_rows <= kFewestRows)
    launch_gemm<Config<kFormat, 4>>(a);
  else if (expected_rows <= kFewRows || a.epilogue == Epilogue::kDown)
    launch_gemm<Config<kFormat, 3>>(a);
  else
    launch_gemm<Config<kFormat, 2>>(a);
}

// Launches the GEMM of x with the matrices [weight_rows, x.cols] of every expert.
void gemm(const DeviceExpertArgs& args, const ActRows& x, int64_t weight_rows, Args a) {
  const TiledExperts& e = args.experts;
  FP4MOE_CHECK(e.num_experts <= kFp8MaxExperts && x.dtype == DType::kF8E4M3 && !args.gather,
               "the FP8 GEMMs do not support these expert rows");
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
