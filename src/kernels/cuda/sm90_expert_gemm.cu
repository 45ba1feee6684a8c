// The expert GEMMs of w4a16 on Hopper.
//
// Computes  gate_up: out[r] = activation(gate x, up x) of the expert that row r belongs to; down: out[r] = W
// h
//           + bias. In a layer both are one launch: a down item waits for its expert's gate/up items alone.
// Shapes    weights in tiles (tile_layout.h); tokens [rows, K] bf16, gathered by slot for gate/up; any
// counts. Bytes     every active expert's weights once, if L2 holds a slab of weights and an expert's tokens.
// Flops     2 rows K N, an expert's rows padded to 16.
// Bound     HBM up to about 60 rows an expert, then the tensor cores.
// Numerics  f32 sums in ascending k, one chain for each output, whatever the counts; weights exact in bf16.
//
// Weights are the register operand of wgmma (swapped A and B), so that one dequantisation serves up to 128
// tokens and few tokens need little padding. A block is four consumer warpgroups, one row tile each, and a
// producer: one warp takes work and brings weight tiles by bulk copies, three bring tokens. A consumer keeps
// one group of wgmma in flight while it dequantises the next. Two consumers with two row tiles each are 11 to
// 28 % slower from 128 to 8192 tokens: two warps a scheduler do not hide their latencies.
#include "kernels/cuda/sm90_expert_gemm.h"

#include <cuda_runtime.h>

#include <string>

#include "base/check.h"
#include "kernels/cuda/fp4_dequant.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sm90_expert_epilogue.cuh"
#include "kernels/cuda/sm90_expert_work.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace fp4moe {
namespace sm90 {
namespace {

__device__ __forceinline__ void release(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

constexpr int kSteps = 2;  // of 16 columns in a group of wgmma

template <int N, int kCount>
__device__ __forceinline__ void add(float (&d)[kCount], const uint32_t (&a)[kSteps][4], uint64_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) Wgmma<N>::add(d, a[s], tokens + 2 * s);
  wgmma_commit();
}

// d += a tokens, by the instruction of 16 `n16` tokens. Every N works on the same registers: with a loop for
// each, ptxas runs out of them and serialises wgmma.
template <int kCount>
__device__ __forceinline__ void add_any(int n16, float (&d)[kCount], const uint32_t (&a)[kSteps][4],
                                        uint64_t tokens) {
  if (n16 <= 2) {
    if (n16 == 1)
      add<16>(d, a, tokens);
    else
      add<32>(d, a, tokens);
  } else if (n16 <= 4) {
    if (n16 == 3)
      add<48>(d, a, tokens);
    else
      add<64>(d, a, tokens);
  } else if (n16 <= 6) {
    if (n16 == 5)
      add<80>(d, a, tokens);
    else
      add<96>(d, a, tokens);
  } else {
    if (n16 == 7)
      add<112>(d, a, tokens);
    else
      add<128>(d, a, tokens);
  }
}

// Sums of one item over all of K. A stage that K does not fill takes its first weights twice, times zeros.
template <class C>
__device__ __forceinline__ void multiply(GemmShared<C>& shared, RingPlace<C::kStages>& stage, int chunks,
                                         int group, int count, float (&d)[C::kMaxN / 2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int n16 = __shfl_sync(~0u, (count + 15) / 16, 0);
  uint32_t a[2][kSteps][4];
  int before = -1;
#pragma unroll 1
  for (int first = 0; first < chunks; first += C::kChunks, stage.next()) {
    const int slot = __shfl_sync(~0u, stage.slot, 0);  // tells the compiler that a warp's lanes agree
    ptx::mbarrier_wait(&shared.full[slot], stage.parity);
    ptx::fence_proxy_async();
    const uint8_t* weights = shared.weights[slot] + group * C::kChunks * C::kTileBytes;
    const uint64_t tokens = wgmma_b_descriptor(ptx::shared_address(shared.tokens[slot]));
    TileWords<C::kFormat> words;
#pragma unroll
    for (int i = 0; i < C::kChunks * 4 / kSteps; ++i) {
      const int chunk = i * kSteps / 4, step = i * kSteps % 4;
      if (step == 0) words.load(weights + (first + chunk < chunks ? chunk : 0) * C::kTileBytes, warp, lane);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        words.decode(step + s, a[i % 2][s]);
        keep_registers(a[i % 2][s]);  // ready before the fence, or wgmma would be serialised
      }
      add_any(n16, d, a[i % 2], tokens + chunk * (C::kChunkBytes / 16) + 2 * step);
      wgmma_wait<1>();
      if (i == 0 && before >= 0) release(&shared.empty[before]);
    }
    before = slot;
  }
  wgmma_wait<0>();
  release(&shared.empty[before]);
  keep_registers(d);
}

// Nothing to multiply: the slab ends before this warpgroup's rows.
template <class C>
__device__ void skip_item(GemmShared<C>& shared, RingPlace<C::kStages>& stage, int chunks) {
  for (int first = 0; first < chunks; first += C::kChunks, stage.next()) {
    ptx::mbarrier_wait(&shared.full[stage.slot], stage.parity);
    release(&shared.empty[stage.slot]);
  }
}

template <class C>
__device__ __forceinline__ void run_item(const GemmArgs& args, GemmShared<C>& shared, const WorkItem& item,
                                         RingPlace<C::kStages>& stage, int group) {
  float d[C::kMaxN / 2];
#pragma unroll
  for (int i = 0; i < C::kMaxN / 2; ++i) d[i] = 0;
  multiply<C>(shared, stage, (args.phases[item.phase].k + 63) / 64, group, item.count, d);
  finish_tile<C>(args, item, item.slab * C::kGroups + group, shared.out[group], 1 + group, d);
}

template <class C>
__device__ void consume(const GemmArgs& args, GemmShared<C>& shared, int group) {
  RingPlace<C::kStages> stage;
  RingPlace<C::kItems> place;
  for (;; place.next()) {
    ptx::mbarrier_wait(&shared.item_full[place.slot], place.parity);
    const WorkItem item = shared.items[place.slot];
    release(&shared.item_empty[place.slot]);
    if (item.expert < 0) return;
    const GemmPhase& phase = args.phases[item.phase];
    if (item.slab * C::kGroups + group < phase.row_tiles)
      run_item<C>(args, shared, item, stage, group);
    else
      skip_item<C>(shared, stage, (phase.k + 63) / 64);
    if (args.num_phases == 2 && item.phase == 0) {
      __threadfence();
      ptx::named_barrier(1 + group, 128);
      if (threadIdx.x % 128 == 0) ptx::add_release(args.rows.progress + 1 + item.expert, 1);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) expert_gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<GemmShared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], C::kLoaderWarps * 32 + 1);
      ptx::mbarrier_init(&shared.empty[i], C::kGroups * 4);
    }
    for (int i = 0; i < C::kItems; ++i) {
      ptx::mbarrier_init(&shared.item_full[i], 1);
      ptx::mbarrier_init(&shared.item_empty[i], C::kGroups * 4 + C::kLoaderWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_dependency_wait();
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
void launch(GemmArgs args) {
  for (int i = 0; i < args.num_phases; ++i)
    args.phases[i].slabs = (args.phases[i].row_tiles + C::kGroups - 1) / C::kGroups;
  const size_t bytes = sizeof(GemmShared<C>) + sizeof(int) * args.num_experts;
  FP4MOE_CHECK(bytes <= static_cast<size_t>(device_limits().shared_bytes_per_block),
               "no room for the work list of " + std::to_string(args.num_experts) + " experts");
  static const bool once =
      (cudaFuncSetAttribute(expert_gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            device_limits().shared_bytes_per_block),
       true);
  static_cast<void>(once);
  const auto sms = static_cast<unsigned>(device_limits().num_sms);
  fp4moe::launch("expert_gemm_sm90", expert_gemm_kernel<C>, {sms, C::kThreads, bytes}, args);
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

void run(const DeviceExpertArgs& a, GemmArgs args) {
  if (a.rows.max_rows == 0) return;
  args.num_experts = static_cast<int>(a.experts.num_experts);
  args.topk = static_cast<int>(a.topk);
  args.activation = a.experts.activation;
  args.scales = a.experts.scales;
  args.rows = a.rows;
  if (args.num_phases == 1) args.rows.progress = nullptr;
  if (a.experts.format == Fp4Format::kMxfp4)
    launch<GemmConfig<Fp4Format::kMxfp4>>(args);
  else
    launch<GemmConfig<Fp4Format::kNvfp4>>(args);
}

}  // namespace
}  // namespace sm90

void sm90_gate_up(const DeviceExpertArgs& a) {
  sm90::GemmArgs args;
  args.phases[0] = sm90::gate_up_phase(a);
  sm90::run(a, args);
}

void sm90_down(const DeviceExpertArgs& a) {
  sm90::GemmArgs args;
  args.phases[0] = sm90::down_phase(a);
  sm90::run(a, args);
}

void sm90_gate_up_down(const DeviceExpertArgs& a) {
  FP4MOE_CHECK(a.rows.progress != nullptr, "both GEMMs in one launch need counters");
  sm90::GemmArgs args;
  args.phases[0] = sm90::gate_up_phase(a);
  args.phases[1] = sm90::down_phase(a);
  args.phases[1].waits = true;
  args.num_phases = 2;
  sm90::run(a, args);
}

}  // namespace fp4moe
