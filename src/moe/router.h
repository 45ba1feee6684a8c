// The router: gate GEMM, scoring, top-k, renormalisation and scaling. Always in f32 on unquantised rows.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "formats/bf16.h"
#include "kernels/expert_ops.h"
#include "kernels/routing_rule.h"

namespace fp4moe {

// ids [K]: best first, distinct, each in [0, E); weights [K]. A NaN logit ranks below every number, so it is
// chosen only if fewer than K logits are numbers; the token's weights are then NaN, and the ids are still
// distinct and in range. kSoftmaxTopk without norm_top_k divides by the sum over all experts, so any NaN
// makes the weights NaN. Infinite logits follow IEEE arithmetic in the same way.
void choose_experts(const float* logits, const RoutingRule& rule, int32_t* ids, float* weights);

// Logits of tokens whose experts have not been chosen yet, and the rule that will choose them.
struct BypassedTopk {
  const float* logits = nullptr;       // token t's [E] start at t * stride
  int64_t num_tokens = 0, stride = 0;  // stride in elements
  RoutingRule rule;
};
// Chooses the experts and writes ids and weights, both [T, K].
void to_standard(const BypassedTopk& topk, int32_t* ids, float* weights, ThreadPool& pool);

struct RouterWeights {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  const bf16* weight = nullptr;        // [E, H] row-major
  std::vector<float> bias;             // [E] or empty: added to the logits
  std::vector<float> correction_bias;  // [E] or empty: added to scores for the choice only, not to weights
  int64_t num_groups = 1, top_k_groups = 1;
  bool norm_top_k = false;
  float scaling_factor = 1;
};

struct RouterShape {
  int64_t num_experts = 0, hidden_size = 0, top_k = 0;
};

// Checks the sizes; kInvalidArgument as for ExpertRouter::make().
Status check_router(const RouterWeights& weights, const RouterShape& shape);
// Returns the rule; its correction_bias is null.
RoutingRule routing_rule(const RouterWeights& weights, const RouterShape& shape);

// The experts of a batch's tokens; the memory belongs to route()'s arena.
struct Routes {
  int32_t* ids = nullptr;    // [T, K], best first, distinct, each in [0, E)
  float* weights = nullptr;  // [T, K]
};

class ExpertRouter {
 public:
  // Copies the weights. kInvalidArgument for a bias of the wrong length, or if the groups do not divide the
  // experts evenly or the chosen groups have fewer than top_k experts; kDoesNotFit if memory allocation
  // fails.
  static Result<ExpertRouter> make(const RouterWeights& weights, const RouterShape& shape,
                                   const ExpertOps& ops);

  // Maximum number of bytes that route() takes from its arena for up to max_tokens rows.
  int64_t scratch_bytes(int64_t max_tokens) const;
  int64_t weight_bytes() const { return panels_.num_bytes(); }
  // x [T, H], f32.
  Routes route(const float* x, int64_t num_tokens, Arena& scratch, ThreadPool& pool) const;

 private:
  int64_t num_panels() const { return (shape_.num_experts + kPanelRows - 1) / kPanelRows; }

  RouterShape shape_;
  RoutingRule rule_;  // correction_bias is null; route() sets it
  const ExpertOps* ops_ = nullptr;
  Buffer panels_;            // [ceil(E / 16)][H][16] bf16, rows past E are zero
  std::vector<float> bias_;  // [ceil(E / 16) * 16]
  std::vector<float> correction_bias_;
};

}  // namespace fp4moe
