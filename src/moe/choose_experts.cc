// Chooses a token's experts and weights from its logits.
#include <algorithm>
#include <cmath>

#include "moe/router.h"

namespace fp4moe {
namespace {

bool better(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

// Up to `most` candidates, sorted by score, best first. If scores are equal, the candidate offered first
// ranks higher.
struct BestList {
  int32_t* ids;
  float* scores;
  int64_t most;
  int64_t n = 0;

  void offer(int64_t id, float score) {
    if (n == most && !better(score, scores[n - 1])) return;
    if (n < most) ++n;
    int64_t i = n - 1;
    for (; i > 0 && better(score, scores[i - 1]); --i) {
      ids[i] = ids[i - 1];
      scores[i] = scores[i - 1];
    }
    ids[i] = static_cast<int32_t>(id);
    scores[i] = score;
  }
};

// A grouped rule's score for a logit, rounded to f32.
float score(const RoutingRule& rule, float logit) {
  const double x = logit;
  if (rule.scoring == RouterScoring::kSigmoidGrouped) return static_cast<float>(1 / (1 + std::exp(-x)));
  const double softplus = (x > 0 ? x : 0) + std::log1p(std::exp(-std::fabs(x)));
  return static_cast<float>(std::sqrt(softplus));
}

// weights[i] = exp(logit of ids[i]) / (sum of exp(logit) over the `count` experts id(0), id(1), ...), scaled.
template <class Id>
void softmax_weights(const float* logits, const RoutingRule& rule, const int32_t* ids, int64_t count,
                     const Id& id, float* weights) {
  const double top = logits[ids[0]];
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(double{logits[id(i)]} - top);
  for (int64_t i = 0; i < rule.top_k; ++i)
    weights[i] = static_cast<float>(std::exp(double{logits[ids[i]]} - top) / sum * rule.scaling_factor);
}

// The score by which DeepSeek's rules choose experts, in f32 as the model computes it.
float biased(const float* logits, const RoutingRule& rule, int64_t e) {
  const float s = score(rule, logits[e]);
  return rule.correction_bias == nullptr ? s : s + rule.correction_bias[e];
}

// Writes the best groups' ids to groups[0, top_k_groups), best first.
void choose_groups(const float* logits, const RoutingRule& rule, int32_t* groups) {
  const int64_t size = rule.num_experts / rule.num_groups;
  float scores[kMaxRouterGroups];
  BestList list{groups, scores, rule.top_k_groups};
  for (int64_t g = 0; g < rule.num_groups; ++g) {
    float best = std::nanf(""), second = best;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const float s = biased(logits, rule, e);
      if (better(s, best)) {
        second = best;
        best = s;
      } else if (better(s, second)) {
        second = s;
      }
    }
    list.offer(g, size == 1 ? best : best + second);
  }
}

void grouped(const float* logits, const RoutingRule& rule, int32_t* ids, float* weights) {
  const int64_t size = rule.num_experts / rule.num_groups;
  int32_t groups[kMaxRouterGroups];
  if (rule.num_groups == rule.top_k_groups) {
    for (int64_t g = 0; g < rule.num_groups; ++g) groups[g] = static_cast<int32_t>(g);
  } else {
    choose_groups(logits, rule, groups);
    std::sort(groups, groups + rule.top_k_groups);  // ascending ids, so that ties go to the lower expert id
  }
  BestList list{ids, weights, rule.top_k};  // weights temporarily hold the choice scores
  for (int64_t g = 0; g < rule.top_k_groups; ++g)
    for (int64_t e = groups[g] * size; e < (groups[g] + 1) * size; ++e)
      list.offer(e, biased(logits, rule, e));
  double sum = 0;
  for (int64_t i = 0; i < rule.top_k; ++i) sum += score(rule, logits[ids[i]]);
  const double divisor = rule.norm_top_k ? sum + 1e-20 : 1;
  for (int64_t i = 0; i < rule.top_k; ++i)
    weights[i] = static_cast<float>(score(rule, logits[ids[i]]) / divisor * rule.scaling_factor);
}

}  // namespace

void choose_experts(const float* logits, const RoutingRule& rule, int32_t* ids, float* weights) {
  if (is_grouped(rule.scoring)) return grouped(logits, rule, ids, weights);
  BestList list{ids, weights, rule.top_k};
  for (int64_t e = 0; e < rule.num_experts; ++e) list.offer(e, logits[e]);
  if (rule.scoring == RouterScoring::kSoftmaxTopk && !rule.norm_top_k)
    return softmax_weights(
        logits, rule, ids, rule.num_experts, [](int64_t i) { return i; }, weights);
  // A softmax over all experts, renormalised over the chosen ones, equals the softmax over the chosen ones.
  softmax_weights(
      logits, rule, ids, rule.top_k, [&](int64_t i) { return ids[i]; }, weights);
}

void to_standard(const BypassedTopk& topk, int32_t* ids, float* weights, ThreadPool& pool) {
  constexpr int64_t kTokensPerChunk = 32;
  const int64_t k = topk.rule.top_k;
  pool.run((topk.num_tokens + kTokensPerChunk - 1) / kTokensPerChunk, [&](int64_t chunk, int) {
    const int64_t first = chunk * kTokensPerChunk;
    for (int64_t t = first; t < std::min(first + kTokensPerChunk, topk.num_tokens); ++t)
      choose_experts(topk.logits + t * topk.stride, topk.rule, ids + t * k, weights + t * k);
  });
}

}  // namespace fp4moe
