#include "moe/router.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int64_t kTokensPerChunk = 32;

int64_t num_chunks(int64_t num_tokens) { return (num_tokens + kTokensPerChunk - 1) / kTokensPerChunk; }

Status check_bias(const char* name, const std::vector<float>& bias, const RouterShape& shape) {
  const auto n = static_cast<int64_t>(bias.size());
  if (n == 0 || n == shape.num_experts) return {};
  return invalid_argument(std::string(name) + " has " + std::to_string(n) + " elements, but num_experts is " +
                          std::to_string(shape.num_experts));
}

Status check_groups(const RouterWeights& w, const RouterShape& shape) {
  const auto text = [](const char* name, int64_t n) { return std::string(name) + "=" + std::to_string(n); };
  if (w.num_groups < 1 || w.num_groups > kMaxRouterGroups || shape.num_experts % w.num_groups != 0)
    return invalid_argument(text("n_group", w.num_groups) + " does not divide " +
                            text("num_experts", shape.num_experts) + " evenly (at most " +
                            std::to_string(kMaxRouterGroups) + " groups)");
  if (w.top_k_groups < 1 || w.top_k_groups > w.num_groups)
    return invalid_argument(text("topk_group", w.top_k_groups) + " must be between 1 and " +
                            text("n_group", w.num_groups));
  const int64_t eligible = shape.num_experts / w.num_groups * w.top_k_groups;
  if (shape.top_k <= eligible) return {};
  return invalid_argument(text("top_k", shape.top_k) + " is more than the " + std::to_string(eligible) +
                          " experts in " + text("topk_group", w.top_k_groups) + " groups");
}

}  // namespace

Status check_router(const RouterWeights& weights, const RouterShape& shape) {
  FP4MOE_RETURN_IF_ERROR(check_bias("router bias", weights.bias, shape));
  FP4MOE_RETURN_IF_ERROR(check_bias("router correction bias", weights.correction_bias, shape));
  return check_groups(weights, shape);
}

RoutingRule routing_rule(const RouterWeights& weights, const RouterShape& shape) {
  return {weights.scoring,      shape.num_experts,  shape.top_k,           weights.num_groups,
          weights.top_k_groups, weights.norm_top_k, weights.scaling_factor};
}

Result<ExpertRouter> ExpertRouter::make(const RouterWeights& weights, const RouterShape& shape,
                                        const ExpertOps& ops) {
  FP4MOE_RETURN_IF_ERROR(check_router(weights, shape));
  ExpertRouter router;
  router.shape_ = shape;
  router.rule_ = routing_rule(weights, shape);
  router.correction_bias_ = weights.correction_bias;
  router.ops_ = &ops;
  const int64_t rows = router.num_panels() * kPanelRows;
  auto buffer = Buffer::make(rows * shape.hidden_size * static_cast<int64_t>(sizeof(bf16)));
  if (!buffer.ok()) return buffer.status().with_context("router weights");
  router.panels_ = std::move(*buffer);
  std::memset(router.panels_.data(), 0, static_cast<size_t>(router.panels_.num_bytes()));
  bf16* panels = router.panels_.as<bf16>();
  for (int64_t e = 0; e < shape.num_experts; ++e) {
    bf16* panel = panels + e / kPanelRows * kPanelRows * shape.hidden_size;
    for (int64_t h = 0; h < shape.hidden_size; ++h)
      panel[h * kPanelRows + e % kPanelRows] = weights.weight[e * shape.hidden_size + h];
  }
  router.bias_ = weights.bias;
  router.bias_.resize(static_cast<size_t>(rows), 0.0f);
  return router;
}

int64_t ExpertRouter::scratch_bytes(int64_t max_tokens) const {
  return Arena::padded(max_tokens * num_panels() * kPanelRows * 4) +
         2 * Arena::padded(max_tokens * shape_.top_k * 4);
}

Routes ExpertRouter::route(const float* x, int64_t num_tokens, Arena& scratch, ThreadPool& pool) const {
  const int64_t stride = num_panels() * kPanelRows, top_k = shape_.top_k;
  float* logits = scratch.take<float>(num_tokens * stride);
  const Routes routes = {scratch.take<int32_t>(num_tokens * top_k), scratch.take<float>(num_tokens * top_k)};
  pool.run(num_chunks(num_tokens) * num_panels(), [&](int64_t chunk, int) {
    const int64_t first = chunk / num_panels() * kTokensPerChunk, panel = chunk % num_panels();
    ops_->router_logits({.x = x + first * shape_.hidden_size,
                         .panel = panels_.as<bf16>() + panel * kPanelRows * shape_.hidden_size,
                         .bias = bias_.data() + panel * kPanelRows,
                         .out = logits + first * stride + panel * kPanelRows,
                         .num_tokens = std::min(kTokensPerChunk, num_tokens - first),
                         .hidden_size = shape_.hidden_size,
                         .out_stride = stride});
  });
  RoutingRule rule = rule_;
  rule.correction_bias = correction_bias_.empty() ? nullptr : correction_bias_.data();
  to_standard({logits, num_tokens, stride, rule}, routes.ids, routes.weights, pool);
  return routes;
}

}  // namespace fp4moe
