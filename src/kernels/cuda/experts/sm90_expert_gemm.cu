// The expert GEMMs of w4a16 on Hopper.
//
// Computes  gate_up: out[r] = activation(gate x, up x) with the weights of row r's expert;
//           down: out[r] = W h + bias.
//           In a layer both run in one launch: a down item waits only for its expert's gate/up items.
//           In an exchange whose slots return, down can store each row on its token's rank.
// Shapes    weights in tiles (tile_layout.h); tokens [rows, K] bf16, gathered by slot for gate/up.
// Bytes     every active expert's weights once, if L2 holds a slab of weights and an expert's tokens.
// Flops     2 rows K N, with an expert's rows padded to a multiple of 8 (few) or 16 (many).
// Bound     few rows: HBM, closely followed by the instructions that unpack (2.2 to 2.8 per weight); many
//           rows: these instructions and the tensor cores together. From about 80 rows per expert on,
//           sm90_wide_gemm.cu is faster.
// Numerics  f32 sums in ascending k, one chain for each output, for any counts; weights exact in bf16.
//           w4a8, few rows: e4m3 codes of tokens and e4m3 operands of weights, both exact in f16.
//
// A block has four consumer warpgroups and a producer warpgroup: one producer warp takes work and loads
// weight tiles with bulk copies, the other three load tokens. Few rows per expert use mma.sync
// (sm90_expert_mma.cuh), with which warps do not wait for each other as the warps of a warpgroup do at each
// wgmma: with 128 tokens, gpt-oss-120b's layer takes 470 us (350 us for the reads) instead of 595 us with
// wgmma. Many rows use wgmma (sm90_expert_wgmma.cuh).
#include "kernels/cuda/experts/sm90_expert_gemm.h"

#include <cuda_runtime.h>

#include <string>

#include "base/check.h"
#include "kernels/cuda/experts/fp4_dequant.cuh"
#include "kernels/cuda/experts/fp8_tokens.cuh"
#include "kernels/cuda/experts/sm90_expert_epilogue.cuh"
#include "kernels/cuda/experts/sm90_expert_mma.cuh"
#include "kernels/cuda/experts/sm90_expert_wgmma.cuh"
#include "kernels/cuda/experts/sm90_expert_work.cuh"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe {
namespace sm90 {
namespace {

constexpr int64_t kFewRows = 28;  // per expert; measured on an H200

// Passes an item's stages without multiplying, because the item has no tile for this warpgroup.
template <class C>
__device__ void skip_item(GemmShared<C>& shared, RingPlace<C::kStages>& stage, int chunks) {
  for (int first = 0; first < chunks; first += C::kChunks, stage.next()) {
    ptx::mbarrier_wait(&shared.full[stage.slot], stage.parity);
    release(&shared.empty[stage.slot]);
  }
}

template <class C, int kGroupTiles, int kBlocks>
__device__ __forceinline__ void run_blocks(const GemmArgs& args, GemmShared<C>& shared, const WorkItem& item,
                                           const ItemScales<C>& scales, RingPlace<C::kStages>& stage,
                                           int group) {
  MmaSums<C, kGroupTiles, kBlocks> sums;
  sums.multiply_tiles(shared, stage, (args.phases[item.phase].k + 63) / 64, group);
#pragma unroll
  for (int t = 0; t < kGroupTiles; ++t)
    finish_tile<C>(args, shared, item, t * C::kGroups + group, scales, sums.d[t]);
}

template <class C, int kGroupTiles>
__device__ __forceinline__ void run_tiles(const GemmArgs& args, GemmShared<C>& shared, const WorkItem& item,
                                          const ItemScales<C>& scales, RingPlace<C::kStages>& stage,
                                          int group) {
  switch ((item.count + 7) / 8) {
    case 1:
      return run_blocks<C, kGroupTiles, 1>(args, shared, item, scales, stage, group);
    case 2:
      return run_blocks<C, kGroupTiles, 2>(args, shared, item, scales, stage, group);
    case 3:
      return run_blocks<C, kGroupTiles, 3>(args, shared, item, scales, stage, group);
    default:
      return run_blocks<C, kGroupTiles, 4>(args, shared, item, scales, stage, group);
  }
}

template <class C>
__device__ __forceinline__ void run_item(const GemmArgs& args, GemmShared<C>& shared, const WorkItem& item,
                                         const ItemScales<C>& scales, RingPlace<C::kStages>& stage,
                                         int group) {
  const int chunks = (args.phases[item.phase].k + 63) / 64;
  if (group >= item.weight_tiles) return skip_item<C>(shared, stage, chunks);
  if constexpr (C::kFew) {
    if (group + C::kGroups < item.weight_tiles)
      run_tiles<C, C::kGroupTiles>(args, shared, item, scales, stage, group);
    else
      run_tiles<C, 1>(args, shared, item, scales, stage, group);
  } else {
    WgmmaSums<C> sums;
    sums.multiply_tiles(shared, stage, chunks, group, item.count);
    finish_tile<C>(args, shared, item, group, scales, sums.d[0]);
  }
}

// w4a8: quantises all of an expert's rows if this warpgroup wrote the last of them. The expert's other
// warpgroups have gone on to other items.
template <class C>
__device__ __forceinline__ void quantise_if_last(const GemmArgs& args, GemmShared<C>& shared,
                                                 const WorkItem& item, int group) {
  const GemmPhase& phase = args.phases[0];
  int* progress = args.rows.progress + 1 + item.expert;
  if (threadIdx.x % 128 == 0)
    shared.is_last[group] = ptx::fetch_add(reinterpret_cast<uint32_t*>(progress), 1) + 1 ==
                            static_cast<uint32_t>(phase.slabs * item.token_tiles * C::kGroups);
  ptx::named_barrier(1 + group, 128);
  if (!shared.is_last[group]) return;
  const int first = args.rows.capacity == 0 ? args.rows.offsets[item.expert]
                                            : item.expert * static_cast<int>(args.rows.capacity);
  const int end = first + rows_of(args.rows, item.expert);
  for (int row = first + threadIdx.x / 32 % 4; row < end; row += 4) {
    auto* values = reinterpret_cast<uint4*>(static_cast<bf16*>(phase.out) + int64_t{row} * phase.cols);
    fp8_row_as_f16(values, phase.cols, values, phase.quantised_out + row);
  }
  ptx::named_barrier(1 + group, 128);
  if (threadIdx.x % 128 == 0) ptx::add_release(progress, 1);
}

template <class C>
__device__ void consume(const GemmArgs& args, GemmShared<C>& shared, int group) {
  RingPlace<C::kStages> stage;
  RingPlace<C::kItems> place;
  RingPlace<C::kItems + 1> scales;
  for (;; place.next(), scales.next()) {
    ptx::mbarrier_wait(&shared.item_full[place.slot], place.parity);
    const WorkItem item = shared.items[place.slot];
    release(&shared.item_empty[place.slot]);
    if (item.expert < 0) return;
    run_item<C>(args, shared, item, shared.scales[C::kFp8 ? scales.slot : 0], stage, group);
    if (args.num_phases == 2 && item.phase == 0) {
      ptx::named_barrier(1 + group, 128);  // orders the group's writes before thread 0's release
      if constexpr (C::kFp8)
        quantise_if_last(args, shared, item, group);
      else if (threadIdx.x % 128 == 0)
        ptx::add_release(args.rows.progress + 1 + item.expert, 1);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) expert_gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<GemmShared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], C::kLoaderWarps + 1);
      ptx::mbarrier_init(&shared.empty[i], C::kGroups * 4);
    }
    for (int i = 0; i < C::kItems; ++i) {
      ptx::mbarrier_init(&shared.item_full[i], 1);
      ptx::mbarrier_init(&shared.item_empty[i], C::kGroups * 4 + C::kLoaderWarps);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (C::kFp8) {
    auto* table = reinterpret_cast<uint8_t*>(shared.table);
    for (int i = threadIdx.x; i < 128 * 8; i += C::kThreads)
      table[i] = fp8_operand_byte<C::kFormat>(i / 8, i % 8);
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  // The blocks that add returned rows load what they need on the SMs that are free first. Those of other
  // kernels that follow would take longer together, because they crowd on these SMs.
  if constexpr (C::kReturns) ptx::grid_dependents_launch();
  const int group = threadIdx.x / 128;
  if (group < C::kGroups) {
    ptx::raise_registers<C::kConsumerRegs>();
    consume<C>(args, shared, group);
    return;
  }
  ptx::lower_registers<C::kProducerRegs>();
  const int warp = threadIdx.x / 32 % 4;
  if (warp < C::kLoaderWarps)
    load_tokens<C>(args, shared, warp);
  else
    schedule_and_load_weights<C>(args, shared);
}

template <class C>
void launch_kernel(GemmArgs args) {
  for (int i = 0; i < args.num_phases; ++i)
    args.phases[i].slabs = (args.phases[i].row_tiles + C::kTiles - 1) / C::kTiles;
  const size_t bytes = sizeof(GemmShared<C>) + sizeof(int) * args.num_experts;
  FP4MOE_CHECK(bytes <= static_cast<size_t>(device_limits().shared_bytes_per_block),
               "no room for the work list of " + std::to_string(args.num_experts) + " experts");
  prepare_kernel(expert_gemm_kernel<C>, {.shared_bytes = device_limits().shared_bytes_per_block});
  const auto sms = static_cast<unsigned>(device_limits().num_sms);
  fp4moe::launch("expert_gemm_sm90", expert_gemm_kernel<C>, {sms, C::kThreads, bytes}, args);
}

template <RowClass kRows>
void launch(Fp4Format format, const GemmArgs& args) {
  const auto with_returns = [&]<Fp4Format kFormat>() {
    args.returns.num_slots > 0 ? launch_kernel<GemmConfig<kFormat, kRows, true>>(args)
                               : launch_kernel<GemmConfig<kFormat, kRows>>(args);
  };
  format == Fp4Format::kMxfp4 ? with_returns.template operator()<Fp4Format::kMxfp4>()
                              : with_returns.template operator()<Fp4Format::kNvfp4>();
}

GemmPhase gate_up_phase(const DeviceExpertArgs& a) {
  const bool gated = is_gated(a.experts.activation.kind);
  GemmPhase phase;
  phase.epilogue = gated ? Epilogue::kGated : Epilogue::kRelu2;
  phase.cols = static_cast<int>(a.experts.intermediate_size);
  phase.row_tiles = static_cast<int>(num_tiles((gated ? 2 : 1) * a.experts.intermediate_size));
  phase.k = static_cast<int>(a.experts.hidden_size);
  phase.w = a.experts.gate_up;
  phase.b = static_cast<const bf16*>(a.x.data);
  phase.gather = a.gather;
  phase.b_row_scales = a.x_row_scales;
  phase.bias = a.experts.gate_up_bias;
  phase.out = a.intermediate.data;
  phase.out_is_f32 = a.intermediate.dtype == DType::kF32;
  return phase;
}

GemmPhase down_phase(const DeviceExpertArgs& a) {
  GemmPhase phase;
  phase.epilogue = Epilogue::kDown;
  phase.cols = static_cast<int>(a.experts.hidden_size);
  phase.row_tiles = static_cast<int>(num_tiles(a.experts.hidden_size));
  phase.k = static_cast<int>(a.experts.intermediate_size);
  phase.w = a.experts.down;
  phase.b = static_cast<const bf16*>(a.h.data);
  phase.b_row_scales = a.h_row_scales;
  phase.bias = a.experts.down_bias;
  phase.out = a.y_bf16 != nullptr ? static_cast<void*>(a.y_bf16) : a.y;
  phase.out_is_f32 = a.y_bf16 == nullptr;
  return phase;
}

void set_common(const DeviceExpertArgs& a, GemmArgs& args) {
  args.num_experts = static_cast<int>(a.experts.num_experts);
  args.topk = static_cast<int>(a.topk);
  args.activation = a.experts.activation;
  args.scales = a.experts.scales;
  args.rows = a.rows;
  if (args.num_phases == 1) args.rows.progress = nullptr;
  if (a.returns == nullptr) return;
  FP4MOE_CHECK(
      a.y_bf16 != nullptr && a.topk == a.returns->shape.top_k && a.returns->shape.allows_returned_rows(),
      "the rows cannot return to the ranks of their tokens");
  args.returns = a2a_slot_places(*a.returns);
}

void launch_gemm(const DeviceExpertArgs& a, GemmArgs args) {
  if (a.rows.max_rows == 0) return;
  set_common(a, args);
  const int64_t rows = a.expected_rows > 0 ? a.expected_rows : a.rows.max_rows / args.num_experts;
  const bool few = rows <= kFewRows;
  few ? launch<RowClass::kFew>(a.experts.format, args) : launch<RowClass::kMany>(a.experts.format, args);
}

void put_in_fp8_tiles(Fp4Format format, GemmPhase& phase) {
  const int64_t rows = (phase.epilogue == Epilogue::kGated ? 2 : 1) * int64_t{phase.cols};
  phase.matrix_bytes = fp8_tiled_bytes(format, rows, phase.k);
  phase.factors_offset = fp8_row_factors_offset(format, rows, phase.k);
}

}  // namespace
}  // namespace sm90

void sm90_gate_up(const DeviceExpertArgs& a) {
  sm90::GemmArgs args;
  args.phases[0] = sm90::gate_up_phase(a);
  sm90::launch_gemm(a, args);
}

void sm90_down(const DeviceExpertArgs& a) {
  sm90::GemmArgs args;
  args.phases[0] = sm90::down_phase(a);
  sm90::launch_gemm(a, args);
}

void sm90_gate_up_down(const DeviceExpertArgs& a) {
  FP4MOE_CHECK(a.rows.progress != nullptr, "both GEMMs in one launch need counters");
  sm90::GemmArgs args;
  args.phases[0] = sm90::gate_up_phase(a);
  args.phases[1] = sm90::down_phase(a);
  args.phases[1].waits = true;
  args.num_phases = 2;
  sm90::launch_gemm(a, args);
}

void sm90_fp8_few_gate_up_down(const DeviceExpertArgs& a, float* h_row_scales) {
  FP4MOE_CHECK(a.rows.progress != nullptr && a.h_row_scales == h_row_scales,
               "both GEMMs in one launch need counters and one set of scales");
  if (a.rows.max_rows == 0) return;
  sm90::GemmArgs args;
  args.phases[0] = sm90::gate_up_phase(a);
  args.phases[0].quantised_out = h_row_scales;
  args.phases[1] = sm90::down_phase(a);
  args.phases[1].waits = true;
  args.num_phases = 2;
  for (sm90::GemmPhase& phase : args.phases) sm90::put_in_fp8_tiles(a.experts.format, phase);
  sm90::set_common(a, args);
  sm90::launch<sm90::RowClass::kFewFp8>(a.experts.format, args);
}

}  // namespace fp4moe
