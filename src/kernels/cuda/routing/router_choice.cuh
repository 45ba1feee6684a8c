// A warp chooses a token's experts as choose_experts() does (moe/router.h): scores, exponentials and sums in
// double, so that equal logits give equal ids.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device_router.h"
#include "kernels/routing_rule.h"

namespace fp4moe {

// Returns a key that orders floats as the choice does: NaN last, zeros of either sign equal.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) return 0;
  const uint32_t u = __float_as_uint(score + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

// A warp's candidates: candidate i belongs to lane i % 32.
struct Candidates {
  const uint32_t* keys;  // [n], shared memory
  int n;
  uint32_t open = 0;  // bit i / 32 is set if this lane's candidate i can still be chosen

  __device__ void take_all() {
    const int lane = threadIdx.x % 32, mine = (n - lane + 31) / 32;
    open = mine >= 32 ? ~0u : (1u << max(mine, 0)) - 1;
  }
  // Returns and closes the best open candidate (on a tie, the one with the lowest id); returns -1 if none is
  // open.
  __device__ int take_best() {
    const int lane = threadIdx.x % 32;
    uint32_t best = 0;
    int id = 1 << 30;
    for (uint32_t left = open; left != 0; left &= left - 1) {
      const int i = (__ffs(static_cast<int>(left)) - 1) * 32 + lane;
      if (id == 1 << 30 || keys[i] > best) best = keys[i], id = i;
    }
    const uint32_t top = __reduce_max_sync(~0u, best);
    const int winner = __reduce_min_sync(~0u, best == top ? id : 1 << 30);
    if (winner == id && id < 1 << 30) open &= ~(1u << (id / 32));
    return winner < 1 << 30 ? winner : -1;
  }
};

// Returns a grouped rule's score for a logit, rounded to f32.
__device__ __forceinline__ float score_of(const RoutingRule& rule, float logit) {
  const double x = logit;
  if (rule.scoring == RouterScoring::kSigmoidGrouped) return static_cast<float>(1 / (1 + exp(-x)));
  return static_cast<float>(sqrt((x > 0 ? x : 0) + log1p(exp(-fabs(x)))));
}

__device__ __forceinline__ double warp_sum(double v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// Returns the sum of a group's two best scores, or NaN if fewer than two of its scores are numbers. For a
// group of size one, returns its score.
__device__ __forceinline__ float group_score(const float* scores, int size, int rotation) {
  float best = nanf(""), second = best;
  for (int i = 0; i < size; ++i) {
    const float s = scores[(i + rotation) % size];
    if (s > best || (best != best && s == s)) {
      second = best, best = s;
    } else if (s > second || (second != second && s == s)) {
      second = s;
    }
  }
  return size == 1 ? best : best + second;
}

// Closes the candidates of all groups but the best ones. The candidates' scores and keys must be set; `room`
// is memory for the groups' keys.
__device__ __forceinline__ void keep_best_groups(const RoutingRule& rule, const float* scores, uint32_t* room,
                                                 Candidates& all) {
  const int groups = static_cast<int>(rule.num_groups), size = all.n / groups, lane = threadIdx.x % 32;
  for (int g = lane; g < groups; g += 32) room[g] = key_of(group_score(scores + g * size, size, g % size));
  __syncwarp();
  Candidates best{room, groups};
  best.take_all();
  uint32_t kept = 0;
  for (int i = 0; i < rule.top_k_groups; ++i) {
    const int g = best.take_best();
    for (uint32_t left = all.open; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      if ((bit * 32 + lane) / size == g) kept |= 1u << bit;
    }
  }
  all.open = kept;
}

// Returns in lane k the weight of the k-th chosen expert. Called by all lanes.
__device__ __forceinline__ float weight_of(const RoutingRule& rule, const float* logits, int id, float top) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(rule.num_experts);
  const bool chosen = lane < rule.top_k;
  if (is_grouped(rule.scoring)) {
    const double score = chosen ? score_of(rule, logits[id]) : 0;
    const double divisor = rule.norm_top_k ? warp_sum(score) + 1e-20 : 1;
    return static_cast<float>(score / divisor * rule.scaling_factor);
  }
  const double value = chosen ? exp(static_cast<double>(logits[id]) - top) : 0;
  double sum = value;
  if (rule.scoring == RouterScoring::kSoftmaxTopk && !rule.norm_top_k) {
    sum = 0;
    for (int e = lane; e < experts; e += 32) sum += exp(static_cast<double>(logits[e]) - top);
  }
  return static_cast<float>(value / warp_sum(sum) * rule.scaling_factor);
}

// Words of shared memory that a warp needs.
__host__ __device__ constexpr int choice_words(int64_t num_experts) {
  return static_cast<int>(3 * num_experts + kMaxRouterGroups);
}

// Outputs of the choice for all rows.
struct Choices {
  int32_t* ids;    // [T, K]
  float* weights;  // [T, K]
  ExpertCountArgs count;
};

// Chooses the experts for row t: logits [E] -> ids and weights [K], best first. Called by all lanes. The
// logits can be in shared memory.
__device__ __forceinline__ void choose_by_warp(const RoutingRule& rule, const float* logits_in,
                                               uint32_t* memory, const Choices& out, int64_t t) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(rule.num_experts);
  const int topk = static_cast<int>(rule.top_k);
  const bool counted = out.count.counts != nullptr && t < *out.count.num_rows;
  const bool grouped = is_grouped(rule.scoring);
  uint32_t* keys = memory;
  auto* logits = reinterpret_cast<float*>(keys + experts);
  float* scores = logits + experts;
  for (int e = lane; e < experts; e += 32) {
    const float logit = logits_in[e];
    float score = grouped ? score_of(rule, logit) : logit;
    if (grouped && rule.correction_bias != nullptr) score += rule.correction_bias[e];
    logits[e] = logit, scores[e] = score, keys[e] = key_of(score);
  }
  __syncwarp();
  Candidates candidates{keys, experts};
  candidates.take_all();
  if (grouped && rule.num_groups != rule.top_k_groups)
    keep_best_groups(rule, scores, keys + 3 * experts, candidates);
  int id = 0, first = 0;
  for (int k = 0; k < topk; ++k) {
    const int best = candidates.take_best();
    if (k == 0) first = best;
    if (k == lane) id = best;
  }
  const float weight = weight_of(rule, logits, id, logits[first]);
  if (lane >= topk) return;
  out.ids[t * topk + lane] = id;
  out.weights[t * topk + lane] = weight;
  if (counted) atomicAdd(reinterpret_cast<unsigned long long*>(out.count.counts + id), 1ull);
}

}  // namespace fp4moe
