// The router's logits for many tokens: a GEMM of f32 tokens with bf16 weights.
//
// Computes:  logits = x W^T (+ bias), x f32 [T, H], W bf16 [E, H].
// Shapes:    H % 32 == 0, any T and E; meant for T >= 256 and E >= 64. A block has 64 tokens and 64, 128 or
//            256 experts.
// Bytes:     4 T H of x for every 64 to 256 experts, 2 E H of weights for every 128 tokens (from L2 after the
//            first), 4 T E of logits.
// Flops:     3 * 2 T E H on the tensor cores: x is split into three bf16 parts, whose products with W are
//            exact.
// Bound:     the tensor cores: 384 cycles for 64 tokens x 256 experts x 16 columns, while the split of 64 x
//            16 elements of x takes about 80 instructions per warp. 28 us for 8192 tokens of H = 2048.
// Numerics:  f32 sums in ascending k, one chain for each output, in which the parts of 16 columns follow each
//            other, largest first; the bias is added last.
//
// A block has one warpgroup that multiplies, with its tokens as wgmma's register operand, and a thread that
// fills the stages with tensor copies. While the tensor cores work on 32 columns, the next 32 are split. The
// two blocks of a cluster have the same experts: each fetches half of the weights for both.
#include "kernels/cuda/routing/router_gate_wide.h"

#include <cuda_runtime.h>

#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_cluster.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/ptx/ring_place.cuh"
#include "kernels/cuda/ptx/tensor_map.h"
#include "kernels/cuda/ptx/token_fragments.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/routing/bf16_parts.cuh"

namespace fp4moe {
namespace wide_gate {
namespace {

constexpr int kTokens = 64, kCluster = 2;
constexpr int kDepth = 64, kHalfDepth = kDepth / 2;  // columns per stage, and per tile of x
constexpr int kStages = 4;
constexpr int kMultipliers = 128, kThreads = kMultipliers + 32;
constexpr int kRowBytes = static_cast<int>(kTensorTileBytes);
static_assert(kRowBytes == kHalfDepth * sizeof(float) && kRowBytes == kDepth * sizeof(bf16));

struct Args {
  CUtensorMap x, weight;  // tiles of kTokens x kHalfDepth f32, and of half a block's experts x kDepth bf16
  const float* bias;      // [E] or null
  float* logits;          // [T, E]
  int num_tokens, num_experts, hidden_size;
};

template <int kExperts>
struct Shared {
  static constexpr int kTileBytes = kTokens * kRowBytes, kWeightBytes = kExperts * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes + kWeightBytes;
  alignas(1024) uint8_t x[kStages][2][kTileBytes];
  alignas(1024) uint8_t weight[kStages][kWeightBytes];
  uint64_t full[kStages], empty[kStages];
};

// Fills the stages; runs on one thread. The first stages' weights do not wait for the kernels before this
// one.
template <int kExperts>
__device__ void load_stages(const Args& a, Shared<kExperts>& shared) {
  constexpr int kHalfBytes = Shared<kExperts>::kWeightBytes / kCluster;
  static_assert(kHalfBytes % 1024 == 0);
  const int rank = static_cast<int>(ptx::cluster_ctarank());
  const int first_expert = static_cast<int>(blockIdx.y) * kExperts + rank * kExperts / kCluster;
  const int first_token = static_cast<int>(blockIdx.x) * kTokens;
  const auto load_weight = [&](int step, int slot) {
    ptx::mbarrier_arrive_expect_tx(&shared.full[slot], Shared<kExperts>::kStageBytes);
    ptx::tensor_load_multicast(shared.weight[slot] + rank * kHalfBytes, &a.weight, step * kDepth,
                               first_expert, &shared.full[slot], (1 << kCluster) - 1);
  };
  const int steps = (a.hidden_size + kDepth - 1) / kDepth, early = min(kStages, steps);
  for (int step = 0; step < early; ++step) load_weight(step, step);
  ptx::grid_dependency_wait();
  RingPlace<kStages> place;
  for (int step = 0; step < steps; ++step, place.next()) {
    if (step >= early) {
      ptx::mbarrier_wait(&shared.empty[place.slot], place.parity ^ 1);
      load_weight(step, place.slot);
    }
    for (int half = 0; half < 2; ++half)
      ptx::tensor_load(shared.x[place.slot][half], &a.x, step * kDepth + half * kHalfDepth, first_token,
                       &shared.full[place.slot]);
  }
}

// The three parts of 16 columns of the warp's tokens; step: which 16 columns of the tile.
__device__ __forceinline__ void split(const TokenFragments& tokens, const uint8_t* tile, int step,
                                      uint32_t (&parts)[3][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = tokens.pair(tile, step, i);
    const Bf16Parts pairs = bf16_parts(v.x, v.y);
#pragma unroll
    for (int part = 0; part < 3; ++part) parts[part][i] = pairs.v[part];
  }
}

// d += the parts of 32 columns * the experts at descriptor `weight`.
template <int kExperts>
__device__ __forceinline__ void add(float (&d)[kExperts / 2], uint32_t (&parts)[2][3][4], uint64_t weight) {
#pragma unroll
  for (int i = 0; i < 6; ++i) keep_registers(parts[i / 3][i % 3]);  // otherwise, wgmma would be serialised
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 6; ++i)
    Wgmma<kExperts>::add(d, parts[i / 3][i % 3], wgmma_b_advance(weight, i / 3 * 32));
  wgmma_commit();
}

// Sets d to the sums of the block's tokens and experts, in wgmma's order.
template <int kExperts>
__device__ __forceinline__ void multiply(const Args& a, Shared<kExperts>& shared, float (&d)[kExperts / 2]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const TokenFragments tokens(warp);
  uint32_t parts[2][2][3][4];
  int before = -1;  // the slot whose weights may still be read
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane < kCluster) ptx::mbarrier_arrive_cluster(&shared.empty[slot], lane);
  };
#pragma unroll
  for (float& sum : d) sum = 0;
  RingPlace<kStages> place;
  const int steps = (a.hidden_size + kDepth - 1) / kDepth;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, place.next()) {
    const int slot = __shfl_sync(~0u, place.slot, 0);  // lets the compiler know that slot is warp-uniform
    ptx::mbarrier_wait(&shared.full[slot], place.parity);
    const uint64_t weight = wgmma_b_descriptor(ptx::shared_address(shared.weight[slot]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) split(tokens, shared.x[slot][half], i, parts[half][i]);
      add<kExperts>(d, parts[half], wgmma_b_advance(weight, half * kHalfDepth * sizeof(bf16)));
      wgmma_wait<1>();
      if (half == 0 && before >= 0) release(before);
    }
    before = slot;
  }
  wgmma_wait<0>();
  keep_registers(d);
  release(before);
}

// Adds the bias and writes the logits.
template <int kExperts>
__device__ __forceinline__ void store(const Args& a, const float (&d)[kExperts / 2]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_token =
      static_cast<int>(blockIdx.x) * kTokens + warp * 16 + TokenFragments::token_of_row(lane / 4);
  const int first_expert = static_cast<int>(blockIdx.y) * kExperts + lane % 4 * 2;
  const bool in_pairs = a.num_experts % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = first_token + half * 8;
    if (token >= a.num_tokens) break;
    float* out = a.logits + int64_t{token} * a.num_experts;
#pragma unroll
    for (int j = 0; j < kExperts / 8; ++j) {
      const int e = first_expert + 8 * j;
      float2 v = {d[4 * j + 2 * half], d[4 * j + 2 * half + 1]};
      const bool both = e + 1 < a.num_experts;
      if (e >= a.num_experts) break;
      if (a.bias != nullptr) v.x += __ldg(a.bias + e), v.y += both ? __ldg(a.bias + e + 1) : 0;
      if (in_pairs) {
        *reinterpret_cast<float2*>(out + e) = v;
      } else {
        out[e] = v.x;
        if (both) out[e + 1] = v.y;
      }
    }
  }
}

template <int kExperts>
__global__ void __launch_bounds__(kThreads, 1) gate_wide_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kExperts>*>(memory);
  ptx::grid_dependents_launch();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kCluster * kMultipliers / 32);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync();
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers) load_stages(a, shared);
    __syncwarp();
  } else {
    float d[kExperts / 2];
    multiply<kExperts>(a, shared, d);
    ptx::grid_dependency_wait();  // before the logits are written
    store<kExperts>(a, d);
  }
  ptx::cluster_sync();  // no block may load into, or signal, a block that has exited
}

// Pairs of token tiles: a cluster's second tile can be empty.
int64_t token_tiles(int64_t num_tokens) { return ceil_div(num_tokens, kTokens * kCluster) * kCluster; }

template <int kExperts>
void launch_kernel(const DeviceRouterArgs& args, Args a) {
  a.weight = tensor_map(args.weight, sizeof(bf16), a.num_experts, a.hidden_size, kExperts / kCluster);
  prepare_kernel(gate_wide_kernel<kExperts>, {.shared_bytes = static_cast<int>(sizeof(Shared<kExperts>))});
  const dim3 grid(static_cast<unsigned>(token_tiles(a.num_tokens)),
                  static_cast<unsigned>(ceil_div(a.num_experts, kExperts)));
  launch("router_gate_wide", gate_wide_kernel<kExperts>,
         {grid, dim3(kThreads), sizeof(Shared<kExperts>), kCluster}, a);
}

// Returns the number of experts per block with which the last block is done first. A step takes about as long
// as the products of 40 experts, plus the products.
int experts_per_block(int64_t num_tokens, int64_t num_experts) {
  int best = 0;
  int64_t least = 0;
  for (const int experts : {256, 128, 64}) {
    const int64_t blocks = token_tiles(num_tokens) * ceil_div(num_experts, experts);
    const int64_t time = ceil_div(blocks, device_limits().num_sms) * (experts + 40);
    if (best == 0 || time < least) best = experts, least = time;
  }
  return best;
}

}  // namespace
}  // namespace wide_gate

bool router_gate_wide_fits(const DeviceRouterArgs& args) {
  return !args.batch_invariant && device_limits().compute_major() == 9 && args.num_tokens >= 256 &&
         args.rule.num_experts >= 64;
}

void router_gate_wide(const DeviceRouterArgs& args) {
  using namespace wide_gate;
  Args a{};
  a.x = tensor_map(args.x, sizeof(float), args.num_tokens, args.hidden_size, kTokens);
  a.bias = args.bias;
  a.logits = args.logits;
  a.num_tokens = static_cast<int>(args.num_tokens);
  a.num_experts = static_cast<int>(args.rule.num_experts);
  a.hidden_size = static_cast<int>(args.hidden_size);
  const int experts = experts_per_block(args.num_tokens, args.rule.num_experts);
  if (experts == 256)
    launch_kernel<256>(args, a);
  else if (experts == 128)
    launch_kernel<128>(args, a);
  else
    launch_kernel<64>(args, a);
}

}  // namespace fp4moe
