// The router: gate GEMM, scoring, top-k, renormalisation and scaling. Always in f32 on unquantised rows.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "formats/bf16.h"
#include "kernels/expert_ops.h"

namespace fp4moe {

// How logits become weights.
enum class RouterScoring : uint8_t {
  kTopkSoftmax,     // top-k of the logits, softmax over these k (gpt-oss)
  kSoftmaxTopk,     // softmax over all experts, top-k of it (Qwen)
  kSigmoidGrouped,  // sigmoid; top-k of sigmoid + correction bias within the best groups; the weights are
                    // the sigmoids (DeepSeek). A group's score is the sum of its two best.
};

constexpr int64_t kMaxRouterGroups = 256;

// What decides about a token beside its logits. Ties go to the lower expert or group.
struct RoutingRule {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  int64_t num_experts = 0, top_k = 0;
  int64_t num_groups = 1, top_k_groups = 1;  // kSigmoidGrouped: experts of the best groups only; 1 of 1: all
  bool norm_top_k = false;                 // kSoftmaxTopk, kSigmoidGrouped: weights are divided by their sum
  float scaling_factor = 1;                // multiplies the weights, here and nowhere else
  const float* correction_bias = nullptr;  // [E] or null, kSigmoidGrouped: joins the choice only
};

// ids [K]: best first, distinct, each in [0, E); weights [K]. A NaN logit ranks below every number, so it is
// chosen only where numbers run out; then the token's weights are NaN (its own output shows it), and the ids
// are still distinct and in range. kSoftmaxTopk without norm_top_k divides by the sum over all experts, so
// there any NaN shows. Infinite logits follow IEEE arithmetic in the same way.
void choose_experts(const float* logits, const RoutingRule& rule, int32_t* ids, float* weights);

// Tokens whose experts are not chosen yet: logits and the rule, for runners that route by themselves.
struct BypassedTopk {
  const float* logits = nullptr;  // token t's [E] start at t * stride
  int64_t num_tokens = 0, stride = 0;
  RoutingRule rule;
};
// What every other runner needs: ids and weights [T, K].
void to_standard(const BypassedTopk& topk, int32_t* ids, float* weights, ThreadPool& pool);

struct RouterWeights {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  const bf16* weight = nullptr;        // [E, H] row-major
  std::vector<float> bias;             // [E] or empty: part of the logits
  std::vector<float> correction_bias;  // [E] or empty: of the choice
  int64_t num_groups = 1, top_k_groups = 1;
  bool norm_top_k = false;
  float scaling_factor = 1;
};

struct RouterShape {
  int64_t num_experts = 0, hidden_size = 0, top_k = 0;
};

// Which experts a batch's tokens go to; memory of the arena that route() took it from.
struct Routes {
  int32_t* ids = nullptr;    // [T, K], best first, distinct, each in [0, E)
  float* weights = nullptr;  // [T, K]
};

class Router {
 public:
  // Copies the weights. kInvalidArgument for a bias of another length or groups that do not cut the experts
  // evenly or hold fewer than top_k; kDoesNotFit if memory is refused.
  static Result<Router> make(const RouterWeights& weights, const RouterShape& shape, const ExpertOps& ops);

  // Bytes that route() takes from its arena for up to max_tokens rows.
  int64_t scratch_bytes(int64_t max_tokens) const;
  int64_t weight_bytes() const { return panels_.num_bytes(); }
  // x [T, H], f32.
  Routes route(const float* x, int64_t num_tokens, Arena& scratch, ThreadPool& pool) const;

 private:
  int64_t num_panels() const { return (shape_.num_experts + kPanelRows - 1) / kPanelRows; }

  RouterShape shape_;
  RoutingRule rule_;  // its correction bias is correction_bias_'s
  const ExpertOps* ops_ = nullptr;
  Buffer panels_;            // [ceil(E / 16)][H][16] bf16, rows past E are zero
  std::vector<float> bias_;  // [ceil(E / 16) * 16]
  std::vector<float> correction_bias_;
};

}  // namespace fp4moe
