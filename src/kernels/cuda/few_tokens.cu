// The whole MoE layer behind the router for few tokens: one persistent kernel, one CTA per SM.
//
// Computes: out[t] (+)= sum over k of weight[t, k] * (act(x W13_e^T + b13_e) W2_e^T + b2_e), e = ids[t, k].
// Shapes: as DeviceMoeArgs; T <= 8, T * topk <= 64. Plan: kernels/cuda/few_tokens_plan.h.
// Bytes: U active experts' tiles once, (gated ? 3 : 2) H I / 2 bytes each and their scales.
// Flops: 2 * 8 columns for each weight on the tensor cores; about 2.6 instructions a weight to decode them.
// Bound: HBM, at T = 1 the latency of two dependent reads: 50 MiB take 13 us, the grid barrier between the
//   phases 1.5 us. The stream of weights does not wait at the barrier: `down` tiles fill the ring before it.
// Numerics: products of bf16 pairs in f32 (mma.sync); a row's sum is cut by k tiles over 6 groups of warps
// and
//   at stripes' ends over CTAs, and put together in a fixed order; activation in f32, h rounded to bf16; the
//   router's weights in f32 in top-k order. Same input and number of SMs, same bits.
//
// Roles of a CTA: 6 groups of 4 consumer warps (a group takes every sixth stage of 2 tiles, a warp 16 rows of
// it), 4 epilogue warps, 1 producer warp. Consumers hand the partial sums of 64 rows to the epilogue in one
// of two buffers and go on.
#include <cuda_runtime_api.h>

#include "base/check.h"
#include "device/stream.h"
#include "kernels/cuda/few_tokens.h"
#include "kernels/cuda/few_tokens_consume.cuh"
#include "kernels/cuda/few_tokens_epilogue.cuh"
#include "kernels/cuda/few_tokens_feed.cuh"
#include "kernels/cuda/launch.h"

namespace fp4moe {
namespace {

template <Fp4Format kFormat>
__global__ void __launch_bounds__(few::kThreads, 1) few_tokens_kernel(const __grid_constant__ few::Args a) {
  using namespace few;
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  uint8_t* act = memory + kSharedBytes;
  uint8_t* ring = act + a.plan.act_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == kProducerWarp * 32) init_barriers(s);
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
  if (warp == kProducerWarp) {
    find_experts(a.moe, s, lane);
    WeightStream<kFormat> stream(a, s, ring, lane);
    const bool produces = lane < kProducerLanes && s.num_experts > 0;
    if (produces) stream.produce(kFirstRounds);
    __syncwarp();
    find_rows(a.moe, s, lane);
    __syncthreads();
    if (produces) stream.produce(1 << 30);
    return;
  }
  if (threadIdx.x == kConsumerWarps * 32)
    s.call = ptx::load_acquire(&a.counters->arrivals) / (a.plan.num_ctas * kEpilogueWarps) + 1;
  stage_x(a, act);
  __syncthreads();
  if (warp >= kConsumerWarps)
    run_epilogue(a, s, act);
  else if (s.num_experts > 0)
    consume<kFormat>(a, s, act, ring);
}

// ---- host ----------------------------------------------------------------------------------------

// CTAs and bytes of shared memory beside Shared; 0 where there is no such GPU.
struct Machine {
  int num_ctas = 0, shared_bytes = 0;
};
Machine machine() {
  static const Machine m = [] {
    const DeviceLimits& limits = device_limits();
    if (limits.compute_major != 9) return Machine{};
    const int bytes = limits.shared_bytes_per_block;
    for (const void* kernel : {reinterpret_cast<const void*>(few_tokens_kernel<Fp4Format::kMxfp4>),
                               reinterpret_cast<const void*>(few_tokens_kernel<Fp4Format::kNvfp4>)})
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return Machine{min(limits.num_sms, kFewMaxCtas), bytes - few::kSharedBytes};
  }();
  return m;
}

int64_t h_bytes(const TiledExperts& e) {
  return kFewMaxPairs * num_tiles(e.intermediate_size) * kFewTileBytesOfRow;
}
int64_t y_bytes(const TiledExperts& e) { return (kFewMaxPairs * e.hidden_size * 4 + 255) / 256 * 256; }

}  // namespace

bool few_tokens_fits(const DeviceMoeArgs& args) {
  const Machine m = machine();
  const int64_t pairs = args.num_tokens * args.topk;
  if (m.num_ctas < kFewMaxPairs || args.num_tokens > kFewMaxTokens || pairs > kFewMaxPairs) return false;
  const FewPlan plan = few_plan(args.experts, args.num_tokens, args.topk, m.num_ctas, m.shared_bytes);
  constexpr int kMaxBlocks = sizeof(FewCounters::blocks) / sizeof(uint32_t);
  const int64_t tiles = int64_t{plan.up.tiles()} > plan.down.tiles() ? plan.up.tiles() : plan.down.tiles();
  return plan.num_stages >= kFewMinStages && plan.down.row_blocks <= kMaxBlocks &&
         (kFewMaxPairs * tiles + 1) * m.num_ctas < (int64_t{1} << 31);
}

int64_t few_tokens_workspace_bytes(const TiledExperts& experts, int64_t) {
  return h_bytes(experts) + y_bytes(experts) + int64_t{kFewMaxCtas} * kFewMaxTokens * kTileRows * 4;
}

void few_tokens_layer(const DeviceMoeArgs& args) {
  if (args.num_tokens == 0) return;
  FP4MOE_CHECK(few_tokens_fits(args), "too many tokens for one launch");
  const Machine m = machine();
  few::Args a;
  a.moe = args;
  a.plan = few_plan(args.experts, args.num_tokens, args.topk, m.num_ctas, m.shared_bytes);
  a.counters = reinterpret_cast<FewCounters*>(args.counters + kFewCountersOffset);
  a.h = args.workspace;
  a.y = reinterpret_cast<float*>(a.h + h_bytes(args.experts));
  a.parts = reinterpret_cast<float*>(a.h + h_bytes(args.experts) + y_bytes(args.experts));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;  // the CTAs wait for each other
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(m.num_ctas));
  config.blockDim = dim3(few::kThreads);
  config.dynamicSmemBytes =
      static_cast<size_t>(few::kSharedBytes + a.plan.act_bytes + a.plan.num_stages * a.plan.stage_bytes);
  config.stream = current_stream().handle();
  config.attrs = attributes;
  config.numAttrs = 2;
  if (args.experts.format == Fp4Format::kMxfp4)
    cudaLaunchKernelEx(&config, few_tokens_kernel<Fp4Format::kMxfp4>, a);
  else
    cudaLaunchKernelEx(&config, few_tokens_kernel<Fp4Format::kNvfp4>, a);
  current_stream().check_launch("few_tokens");
}

}  // namespace fp4moe
