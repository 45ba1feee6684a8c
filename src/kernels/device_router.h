// The router on a GPU: gate GEMM, scoring, top-k. Conventions: kernels/device_moe.h; experts are chosen as by
// choose_experts() (moe/router.h) from the logits computed here.
#pragma once

#include <cstdint>

#include "formats/bf16.h"
#include "kernels/ops.h"
#include "kernels/routing_rule.h"

namespace fp4moe {

constexpr int64_t kMaxDeviceExperts = 1024, kMaxDeviceTopk = 32;  // E and K of a router on a GPU

// Counters of the chosen experts. Padding rows, [*num_rows, T), are not counted.
struct ExpertCountArgs {              // both: device memory, or both null
  uint64_t* counts = nullptr;         // [E], added to
  const int32_t* num_rows = nullptr;  // [1]
};

struct DeviceRouterArgs {                  // all pointers: device memory, x and weight 16-byte aligned
  const float* x = nullptr;                // [T, H]; H % 32 == 0
  const bf16* weight = nullptr;            // [E, H]
  const float* bias = nullptr;             // [E] or null: added to the logits
  const float* correction_bias = nullptr;  // [E] or null; used instead of rule's, which is null
  int64_t num_tokens = 0, hidden_size = 0;
  RoutingRule rule;
  float* logits = nullptr;   // [T, E], written: f32 sums
  int32_t* ids = nullptr;    // [T, K], written: best first, distinct, in range
  float* weights = nullptr;  // [T, K], written
  ExpertCountArgs count;
  // If set (Hopper only), this norm runs first with both outputs; its out_f32 is x. Null: x is already
  // computed.
  const RmsNormArgs* norm = nullptr;
  bool batch_invariant = false;  // a token's logits have the same bits whatever T is
};

}  // namespace fp4moe
