// How a router's logits become experts and weights.
#pragma once

#include <cstdint>

namespace fp4moe {

// How logits become weights.
enum class RouterScoring : uint8_t {
  kTopkSoftmax,     // top-k of the logits, then softmax over these k (gpt-oss)
  kSoftmaxTopk,     // softmax over all experts, then top-k of the result (Qwen)
  kSigmoidGrouped,  // sigmoid; top-k of sigmoid + correction bias within the best groups; the weights are
                    // the sigmoids (DeepSeek-V3). A group's score is the sum of its two best experts' scores.
  kSqrtSoftplus,    // the same with sqrt(log(1 + exp(logit))) instead of the sigmoid (DeepSeek-V4)
};

// Returns whether the rule has groups and a correction bias.
constexpr bool is_grouped(RouterScoring scoring) {
  return scoring == RouterScoring::kSigmoidGrouped || scoring == RouterScoring::kSqrtSoftplus;
}

constexpr int64_t kMaxRouterGroups = 256;

// How experts are chosen from a token's logits. Ties go to the lower expert or group.
struct RoutingRule {
  RouterScoring scoring = RouterScoring::kTopkSoftmax;
  int64_t num_experts = 0, top_k = 0;
  int64_t num_groups = 1, top_k_groups = 1;  // grouped rules: only experts of the best groups; 1 of 1: all
  bool norm_top_k = false;                   // all but kTopkSoftmax: weights are divided by their sum
  float scaling_factor = 1;                  // multiplies the weights, here and nowhere else
  const float* correction_bias = nullptr;    // [E] or null, grouped rules: affects the choice, not the
                                             // weights
};

}  // namespace fp4moe
