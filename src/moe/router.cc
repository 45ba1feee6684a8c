#include "moe/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace fp4moe {
namespace {

constexpr int64_t kTokensPerChunk = 32;

int64_t num_chunks(int64_t num_tokens) { return (num_tokens + kTokensPerChunk - 1) / kTokensPerChunk; }

}  // namespace

Result<Router> Router::make(const RouterWeights& weights, const RouterShape& shape, const ExpertOps& ops) {
  const auto num_bias = static_cast<int64_t>(weights.bias.size());
  if (num_bias != 0 && num_bias != shape.num_experts)
    return invalid_argument("router bias has " + std::to_string(num_bias) + " elements, num_experts is " +
                            std::to_string(shape.num_experts));
  Router router;
  router.shape_ = shape;
  router.scoring_ = weights.scoring;
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

int64_t Router::scratch_bytes(int64_t max_tokens) const {
  return Arena::padded(max_tokens * num_panels() * kPanelRows * 4) +
         2 * Arena::padded(max_tokens * shape_.top_k * 4);
}

Routes Router::route(const float* x, int64_t num_tokens, Arena& scratch, ThreadPool& pool) const {
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
  pool.run(num_chunks(num_tokens), [&](int64_t chunk, int) {
    const int64_t first = chunk * kTokensPerChunk;
    for (int64_t t = first; t < std::min(first + kTokensPerChunk, num_tokens); ++t)
      topk_softmax(logits + t * stride, shape_, routes.ids + t * top_k, routes.weights + t * top_k);
  });
  return routes;
}

void topk_softmax(const float* logits, const RouterShape& shape, int32_t* ids, float* weights) {
  const auto better = [](float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); };
  // ids[0, n) stay sorted, best first; an equal logit of a later id goes behind.
  for (int64_t e = 0, n = 0; e < shape.num_experts; ++e) {
    if (n == shape.top_k && !better(logits[e], logits[ids[n - 1]])) continue;
    if (n < shape.top_k) ++n;
    int64_t i = n - 1;
    for (; i > 0 && better(logits[e], logits[ids[i - 1]]); --i) ids[i] = ids[i - 1];
    ids[i] = static_cast<int32_t>(e);
  }
  double sum = 0;
  for (int64_t i = 0; i < shape.top_k; ++i) sum += std::exp(double{logits[ids[i]]} - logits[ids[0]]);
  for (int64_t i = 0; i < shape.top_k; ++i)
    weights[i] = static_cast<float>(std::exp(double{logits[ids[i]]} - logits[ids[0]]) / sum);
}

}  // namespace fp4moe
