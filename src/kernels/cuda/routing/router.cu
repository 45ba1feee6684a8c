// The router: a gate GEMM on the tensor cores, then scoring and choice with one warp for each token or few
// tokens.
//
// Computes:  logits = x W^T (+ bias), x f32 [T, H], W bf16 [E, H]; then choose_experts() for each row.
// Shapes:    H % 32 == 0, E <= 1024, top-k <= 32, any T.
// Bytes:     2 E H of weights for every 8 to 32 tokens (from L2 after the first), 4 T H of x for every 16, 32
//            or 256 experts, 4 T E of logits.
// Flops:     3 * 2 T E H on the tensor cores: x is split into three bf16 parts, whose products with W are
//            exact.
// Bound:     T <= 8: the read of W, 1 to 4 MB; T < 256: the reads of W and x from the L2; more: splitting x,
//            which takes 8 instructions per element for every 256 experts. router_gate_wide.cu computes the
//            logits of prefill on Hopper.
// Numerics:  sums in f32 in a fixed order that depends on T, E and H (batch_invariant: on E and H only). The
//            choice computes scores, exponentials and sums in double, as on the CPU: equal logits give equal
//            ids.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "base/check.h"
#include "device/stream.h"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_mma.cuh"
#include "kernels/cuda/ptx/ptx_order.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"
#include "kernels/cuda/routing/bf16_parts.cuh"
#include "kernels/cuda/routing/norm_route.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/routing/router_choice.cuh"
#include "kernels/cuda/routing/router_gate_wide.h"

namespace fp4moe {
namespace {

constexpr int kGateWarps = 8, kChunk = 32;  // columns in one step
constexpr int kMaxSplits = 8;               // CTAs in a cluster
constexpr int kChooseWarps = 4, kMaxChooseWarps = 16, kMaxTeamWarps = 8;

// ---- gate ----------------------------------------------------------------------------------------

struct GateArgs {
  const float* x;
  const bf16* weight;
  const float* bias;  // or null
  float* logits;      // [T, E]
  int num_tokens, num_experts, hidden_size;
  int expert_warps;  // warps of a CTA with different experts; the other warps split the columns
};

// kExperts tiles of 16 experts and kTokens tiles of 8 tokens for each warp. The columns of a chunk can be in
// any order in the fragments if it is the same for both operands: lane q of four has columns 8 q ... 8 q + 7.
template <int kExperts, int kTokens>
struct GateTile {
  using Weights = uint4[kExperts][2];
  float sum[kExperts][kTokens][4] = {};

  static __device__ void load_weights(const GateArgs& a, int first_expert, int chunk, Weights& w) {
    const int lane = threadIdx.x % 32, g = lane / 4, col = chunk * kChunk + lane % 4 * 8;
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kExperts; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int e = first_expert + i * 16 + r * 8 + g;
        w[i][r] = e < a.num_experts ? __ldg(reinterpret_cast<const uint4*>(
                                          a.weight + static_cast<int64_t>(e) * a.hidden_size + col))
                                    : zero;
      }
  }

  __device__ void add_chunk(const GateArgs& a, const Weights& w, int first_token, int chunk) {
    const int lane = threadIdx.x % 32, g = lane / 4, col = chunk * kChunk + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const int t = first_token + j * 8 + g;
      float4 x[2] = {};
      if (t < a.num_tokens) {
        const auto* row =
            reinterpret_cast<const float4*>(a.x + static_cast<int64_t>(t) * a.hidden_size + col);
        x[0] = row[0], x[1] = row[1];
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const Bf16Parts b0 = bf16_parts(x[step].x, x[step].y), b1 = bf16_parts(x[step].z, x[step].w);
#pragma unroll
        for (int part = 0; part < 3; ++part)
#pragma unroll
          for (int i = 0; i < kExperts; ++i) {
            const uint4 low = w[i][0], high = w[i][1];
            const uint32_t fragment[4] = {step == 0 ? low.x : low.z, step == 0 ? high.x : high.z,
                                          step == 0 ? low.y : low.w, step == 0 ? high.y : high.w};
            ptx::mma_bf16(sum[i][j], fragment, b0.v[part], b1.v[part]);
          }
      }
    }
  }
};

// Cluster barriers, reads of another block's shared memory and dependent launches, on SM90 and later. Older
// GPUs have no clusters and run one kernel after another.
__device__ void wait_for_cluster(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) return cooperative_groups::this_cluster().sync();
#endif
  __syncthreads();
}
__device__ float shared_of_block(const float* p, int rank) {
#if __CUDA_ARCH__ >= 900
  p = cooperative_groups::this_cluster().map_shared_rank(p, rank);
#endif
  return *p;
}
__device__ void wait_for_earlier_kernels() {
  ptx::grid_dependents_launch();
  ptx::grid_dependency_wait();
}

// Grid: (tiles of experts, tiles of tokens, splits of the columns, which form one cluster).
template <int kExperts, int kTokens>
__global__ void __launch_bounds__(kGateWarps * 32) gate_kernel(const __grid_constant__ GateArgs a) {
  constexpr int kValues = kExperts * kTokens * 4;
  constexpr int kHeld = kTokens == 1 ? 4 : 1;  // chunks whose weights are requested before the rows are ready
  __shared__ float shared[kGateWarps][kValues * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert_warp = warp % a.expert_warps, slice = warp / a.expert_warps;
  const int slices = kGateWarps / a.expert_warps, splits = static_cast<int>(gridDim.z);
  const int first_expert = (blockIdx.x * a.expert_warps + expert_warp) * 16 * kExperts;
  const int first_token = blockIdx.y * 8 * kTokens;
  GateTile<kExperts, kTokens> tile;
  const int chunks = first_expert < a.num_experts ? a.hidden_size / kChunk : 0, step = slices * splits;
  const int first_chunk = blockIdx.z * slices + slice;
  typename GateTile<kExperts, kTokens>::Weights held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (const int chunk = first_chunk + i * step; chunk < chunks)
      tile.load_weights(a, first_expert, chunk, held[i]);
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (const int chunk = first_chunk + i * step; chunk < chunks)
      tile.add_chunk(a, held[i], first_token, chunk);
#pragma unroll 2
  for (int chunk = first_chunk + kHeld * step; chunk < chunks; chunk += step) {
    tile.load_weights(a, first_expert, chunk, held[0]);
    tile.add_chunk(a, held[0], first_token, chunk);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    shared[warp][i * 32 + lane] = tile.sum[i / 4 / kTokens][i / 4 % kTokens][i % 4];
  __syncthreads();
  // Adds up the block's slices in place of the first slice; the cluster's first block then adds up the
  // sums of all blocks.
  const int num_sums = a.expert_warps * kValues * 32;
  for (int v = threadIdx.x; v < num_sums; v += kGateWarps * 32) {
    float* first = &shared[v / (kValues * 32)][v % (kValues * 32)];
    float sum = *first;
    for (int s = 1; s < slices; ++s) sum += first[s * a.expert_warps * kValues * 32];
    *first = sum;
  }
  wait_for_cluster(splits);
  for (int v = threadIdx.x; v < num_sums && blockIdx.z == 0; v += kGateWarps * 32) {
    const int i = v % (kValues * 32) / 32, of = v % 32, tile_warp = v / (kValues * 32);
    const int e = (blockIdx.x * a.expert_warps + tile_warp) * 16 * kExperts + i / 4 / kTokens * 16 +
                  i % 4 / 2 * 8 + of / 4;
    const int t = first_token + i / 4 % kTokens * 8 + of % 4 * 2 + i % 2;
    float parts[kMaxSplits];
#pragma unroll
    for (int z = 0; z < kMaxSplits; ++z)
      parts[z] = z < splits ? shared_of_block(&shared[tile_warp][v % (kValues * 32)], z) : 0;
    float sum = 0;
#pragma unroll
    for (int z = 0; z < kMaxSplits; ++z) sum += parts[z];
    if (e >= a.num_experts || t >= a.num_tokens) continue;
    a.logits[static_cast<int64_t>(t) * a.num_experts + e] = a.bias != nullptr ? sum + a.bias[e] : sum;
  }
  wait_for_cluster(splits);  // no block exits while its sums are being read
}

// ---- choice --------------------------------------------------------------------------------------

struct ChooseArgs {
  RoutingRule rule;
  const float* logits;  // [T, E]
  int num_tokens;
  int team;  // warps per token: 1, or all of a block; they compute its scores, and the first one chooses
  Choices out;
};

// A block counts its experts in shared memory first: additions to one address in the L2 are serial. Shared
// memory: the warps' memory for the choice, then counts [E].
__global__ void __launch_bounds__(kMaxChooseWarps * 32, 2)
    choose_kernel(const __grid_constant__ ChooseArgs a) {
  extern __shared__ uint32_t memory[];
  const int experts = static_cast<int>(a.rule.num_experts), words = choice_words(experts),
            teams = static_cast<int>(blockDim.x) / 32 / a.team,
            team = static_cast<int>(threadIdx.x) / 32 / a.team, threads = a.team * 32,
            thread = static_cast<int>(threadIdx.x) % threads;
  uint32_t* counts = memory + teams * words;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  wait_for_earlier_kernels();
  const bool counted = a.out.count.counts != nullptr;
  const int counted_rows = counted ? *a.out.count.num_rows - a.out.count.first_row : 0;
  __syncthreads();
  const ChoiceMemory room(a.rule, memory + team * words);
  for (int t = blockIdx.x * teams + team; t < a.num_tokens; t += gridDim.x * teams) {
    room.put_row(a.rule, a.logits + static_cast<int64_t>(t) * experts, thread, threads);
    a.team == 1 ? __syncwarp() : __syncthreads();
    if (thread < 32)
      if (const int id = choose_of(a.rule, room, a.out, t).id; id >= 0 && t < counted_rows)
        atomicAdd(counts + id, 1u);
    a.team == 1 ? __syncwarp() : __syncthreads();
  }
  if (!counted) return;
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x)
    if (counts[e] != 0) add_count(a.out.count.counts, e, counts[e]);
}

// ---- host ----------------------------------------------------------------------------------------

unsigned blocks_of(int64_t n, int64_t size) { return static_cast<unsigned>(ceil_div(n, size)); }

// A kernel's experts and tokens per warp, and how many blocks it should have.
struct GateForm {
  void (*kernel)(GateArgs);
  int experts, tokens;
  unsigned blocks;
};
constexpr GateForm kFewGate{gate_kernel<1, 1>, 16, 8, 256}, kMediumGate{gate_kernel<2, 2>, 32, 16, 512},
    kManyGate{gate_kernel<2, 4>, 32, 32, 256};

// How the gate is split. With up to 255 tokens, splitting the columns gives work to all SMs.
struct GatePlan {
  const GateForm* form;
  int expert_warps = 1;
  dim3 grid = {};
};
GatePlan gate_plan(int64_t num_tokens, int64_t num_experts, bool batch_invariant) {
  constexpr unsigned kInvariantSplits = 4;
  GatePlan p{batch_invariant || num_tokens <= 64 ? &kFewGate : num_tokens < 256 ? &kMediumGate : &kManyGate};
  const int experts = p.form->experts;
  if (p.form == &kManyGate)
    while (p.expert_warps < kGateWarps && p.expert_warps * experts < num_experts) p.expert_warps *= 2;
  p.grid = dim3(blocks_of(num_experts, p.expert_warps * experts), blocks_of(num_tokens, p.form->tokens));
  if (batch_invariant) {
    p.grid.z = has_clusters() ? kInvariantSplits : 1;
    return p;
  }
  while (has_clusters() && p.grid.z < kMaxSplits && p.grid.x * p.grid.y * p.grid.z * 2 <= p.form->blocks)
    p.grid.z *= 2;
  return p;
}

}  // namespace

void router_gate(const DeviceRouterArgs& args) {
  if (router_gate_wide_fits(args)) return router_gate_wide(args);
  const GatePlan plan = gate_plan(args.num_tokens, args.rule.num_experts, args.batch_invariant);
  const GateArgs a = {.x = args.x,
                      .weight = args.weight,
                      .bias = args.bias,
                      .logits = args.logits,
                      .num_tokens = static_cast<int>(args.num_tokens),
                      .num_experts = static_cast<int>(args.rule.num_experts),
                      .hidden_size = static_cast<int>(args.hidden_size),
                      .expert_warps = plan.expert_warps};
  launch("router_gate", plan.form->kernel, {plan.grid, dim3(kGateWarps * 32), 0, dim3(1, 1, plan.grid.z)}, a);
}

void router_choose(const DeviceRouterArgs& args) {
  ChooseArgs a = {.rule = args.rule,
                  .logits = args.logits,
                  .num_tokens = static_cast<int>(args.num_tokens),
                  .out = {args.ids, args.weights, args.count}};
  a.rule.correction_bias = args.correction_bias;
  const auto shared_bytes = [](int teams, int64_t experts) {
    return static_cast<int>(4 * (teams * choice_words(experts) + experts));
  };
  // A block's warps compute the scores of one of few tokens together: exponentials in double take most of the
  // time. Blocks of 4 warps spread more tokens over the SMs. With many, larger blocks add fewer counts to the
  // L2, and their warps take several tokens each.
  const int64_t experts = args.rule.num_experts, sms = device_limits().num_sms;
  const bool few = args.num_tokens <= sms, many = args.num_tokens > kChooseWarps * 4 * sms && experts <= 256;
  const int warps = few    ? static_cast<int>(std::clamp<int64_t>(ceil_div(experts, 32), 1, kMaxTeamWarps))
                    : many ? kMaxChooseWarps
                           : kChooseWarps;
  a.team = few ? warps : 1;
  const int teams = warps / a.team;
  prepare_kernel(choose_kernel, {.shared_bytes = std::max(shared_bytes(kChooseWarps, kMaxDeviceExperts),
                                                          shared_bytes(kMaxChooseWarps, 256))});
  unsigned blocks = blocks_of(args.num_tokens, teams);
  if (many) blocks = std::min(blocks, static_cast<unsigned>(2 * sms));
  launch("router_choose", choose_kernel,
         {dim3(blocks), dim3(static_cast<unsigned>(warps * 32)),
          static_cast<size_t>(shared_bytes(teams, experts))},
         a);
}

bool cuda_route_fuses_norm(const DeviceRouterArgs& args) {
  return !args.batch_invariant && norm_route_fits(args);
}

bool cuda_route_sends(const DeviceRouterArgs& args) {
  return cuda_route_fuses_norm(args) && norm_route_sends(args);
}

void cuda_route(const DeviceRouterArgs& args) {
  if (args.num_tokens == 0) return;
  FP4MOE_CHECK(args.hidden_size % kChunk == 0 && args.rule.num_experts <= kMaxDeviceExperts &&
                   args.rule.top_k <= kMaxDeviceTopk,
               "unsupported router sizes");
  const bool fuses_norm = args.norm != nullptr && cuda_route_fuses_norm(args);
  FP4MOE_CHECK(args.round == nullptr || fuses_norm, "only the launch that also norms the rows sends them");
  if (fuses_norm) return norm_route(args);
  if (args.norm != nullptr) cuda::rms_norm_rows(*args.norm);
  router_gate(args);
  router_choose(args);
}

}  // namespace fp4moe
