// The router on a GPU: gate GEMM, scoring, top-k. Conventions: kernels/device_moe.h. From the logits computed
// here, it chooses the same experts as choose_experts() (moe/router.h).
#pragma once

#include <cstdint>

#include "formats/bf16.h"
#include "kernels/ops.h"
#include "kernels/routing_rule.h"

namespace fp4moe {

struct A2aRound;  // kernels/device_a2a.h

using RouterWord = unsigned long long;                            // on a GPU
constexpr int64_t kRouterFewTokens = 16;                          // tokens whose experts several blocks share
constexpr int64_t kMaxDeviceExperts = 1024, kMaxDeviceTopk = 32;  // limits of E and K on a GPU

// Counters of the chosen experts. Padding rows, [*num_rows, T), are not counted.
struct ExpertCountArgs {              // the pointers are in device memory, or both null
  uint64_t* counts = nullptr;         // [E], incremented
  const int32_t* num_rows = nullptr;  // [1]
  int32_t first_row = 0;              // the row of the first token
};

struct DeviceRouterArgs {                  // all in device memory; x and weight 16-byte aligned
  const float* x = nullptr;                // [T, H]; H % 32 == 0
  const bf16* weight = nullptr;            // [E, H]
  const float* bias = nullptr;             // [E] or null: added to the logits
  const float* correction_bias = nullptr;  // [E] or null; used instead of rule.correction_bias, which is null
  int64_t num_tokens = 0, hidden_size = 0;
  RoutingRule rule;
  float* logits = nullptr;   // [T, E], written: f32 sums
  int32_t* ids = nullptr;    // [T, K], written: best first, distinct, in range
  float* weights = nullptr;  // [T, K], written
  ExpertCountArgs count;
  // If set (Hopper only), this norm runs first and writes both outputs; its out_f32 is x. Null: x is already
  // computed.
  const RmsNormArgs* norm = nullptr;
  bool batch_invariant = false;  // a token's logits have the same bits whatever T is
  // [kRouterFewTokens, E] or null: with them, a norm and several blocks per token run in one launch. Zero
  // before the first call and after each call; all calls use one stream.
  RouterWord* words = nullptr;
  // If set, the normalised rows, ids and weights also go to the lanes of this round, on all ranks, in place
  // of DeviceA2aOps::send_direct() or send(). Only with a norm, and if DeviceMoeOps::route_sends(). The other
  // ranks of the round may send in either way.
  const A2aRound* round = nullptr;
  bool round_is_direct = false;
};

}  // namespace fp4moe
