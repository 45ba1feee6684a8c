// Where the launch that norms and routes tokens (norm_route.cu) sends its rows and choices, besides its
// outputs. Device code only.
#pragma once

#include "kernels/cuda/comm/a2a_direct.cuh"
#include "kernels/cuda/comm/a2a_rows.cuh"
#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/routing/router_choice.cuh"

namespace fp4moe {

struct NormRouteArgs {
  const float *x, *norm_weight;
  bf16* out_act;
  float* out_f32;
  const bf16* weight;
  const float* bias;  // or null
  RoutingRule rule;
  float* logits;
  Choices out;
  float eps, inverse_hidden;  // inverse_hidden: 1 / hidden_size
  int hidden_size, num_experts;
  RouterWord* words;  // [T, E], for few tokens: logits on their way
};

// Sends nothing to other ranks.
struct NoSender {
  using Args = NormRouteArgs;
  static constexpr bool kSends = false;
  __device__ __forceinline__ NoSender(const Args&, int) {}
  __device__ __forceinline__ void send_row(int, const uint4&) const {}
  __device__ __forceinline__ void send_slot(const ChosenSlot&) const {}
  __device__ __forceinline__ void finish() const {}
};

// Sends a token's row and slots to all ranks in a direct round.
struct LaneSender {
  struct Args : NormRouteArgs {
    A2aRound round;
  };
  int token;
  cuda::DirectSender lanes;
  bool is_filled;

  __device__ __forceinline__ LaneSender(const Args& a, int t)
      : token(t),
        lanes(a.round),
        is_filled(a.round.num_filled == nullptr || t < __ldcg(a.round.num_filled)) {}
  __device__ __forceinline__ void send_row(int v, const uint4& words) const {
    lanes.store_row(token, v, words);
  }
  __device__ __forceinline__ void send_slot(const ChosenSlot& slot) const {
    if (slot.id >= 0) lanes.store_slot(token, static_cast<int>(threadIdx.x), is_filled, slot.id, slot.weight);
  }
};

// Sends a token's row and slots to all ranks in a round that is not direct, as DeviceA2aOps::send() does. All
// threads of all blocks make one, after the wait for the preceding kernels.
struct RoundSender {
  struct Args : NormRouteArgs {
    A2aRound round;
    int token_flags;  // cuda::send_flags_per_token()
  };
  static constexpr bool kSends = true;
  const Args& args;
  int token;
  bool is_filled;
  cuda::Operation operation;

  __device__ __forceinline__ RoundSender(const Args& a, int t)
      : args(a), token(t), is_filled(cuda::is_filled(a.round, t)), operation(a.round.group, a.round.op) {}
  // Vector v of the row: eight columns in bf16.
  __device__ __forceinline__ void send_row(int v, const uint4& words) const {
    if (!is_filled || operation.failed) return;
    for (int r = 0; r < args.round.group.size; ++r)
      reinterpret_cast<uint4*>(cuda::lane_row(args.round, r, lane()))[v] = words;
  }
  // Called by the lanes of the warp that has chosen, each with its slot.
  __device__ __forceinline__ void send_slot(const ChosenSlot& slot) const {
    const int k = static_cast<int>(threadIdx.x) % 32;
    if (k >= static_cast<int>(args.round.shape.top_k) || operation.failed) return;
    const bool is_sent = is_filled && cuda::is_expert(args.round.shape, slot.id);
    for (int r = 0; r < args.round.group.size; ++r) {
      cuda::lane_ids(args.round, r, lane())[k] = is_sent ? slot.id : -1;
      cuda::lane_weights(args.round, r, lane())[k] = is_sent ? slot.weight : 0;
    }
  }
  // Raises the flags of the token's pieces. Called by the whole block that has sent both.
  __device__ __forceinline__ void finish() const {
    __syncthreads();
    if (!operation.failed) cuda::raise_flags(operation, int64_t{token} * args.token_flags, args.token_flags);
  }

 private:
  __device__ __forceinline__ int64_t lane() const {
    return args.round.group.rank * args.round.num_tokens + token;
  }
};

}  // namespace fp4moe
