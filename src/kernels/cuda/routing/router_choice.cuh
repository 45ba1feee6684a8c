// A warp chooses a token's experts as choose_experts() does (moe/router.h): scores, exponentials and sums in
// double, so that equal logits give equal ids.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device_router.h"
#include "kernels/routing_rule.h"

namespace fp4moe {

// Returns a key that orders floats as the choice does: NaN last, zeros of either sign equal. No key is 0.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) return 1;
  const uint32_t u = __float_as_uint(score + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

// A warp's candidates, in registers: candidate i is key i / 32 of lane i % 32. A closed candidate has key 0.
template <int kPerLane>
struct Candidates {
  uint32_t keys[kPerLane];

  // Opens candidates 0 ... n - 1; from: their keys, in shared memory.
  __device__ __forceinline__ void load(const uint32_t* from, int n) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = j * 32 + static_cast<int>(threadIdx.x) % 32;
      keys[j] = i < n ? from[i] : 0;
    }
  }
  // Closes the best open candidate (on a tie, the one with the lowest id). Returns its id in its lane, and -1
  // in the other lanes. The place in the lane is found while the maximum over the lanes is on its way.
  __device__ __forceinline__ int take_best() {
    uint32_t best = keys[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) best = max(best, keys[j]);
    const uint32_t top = __reduce_max_sync(~0u, best);
    int place = 0;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j) place = keys[j] == best ? j : place;
    const int id = place * 32 + static_cast<int>(threadIdx.x) % 32;
    bool wins = best == top && top != 0;
    if (const uint32_t winners = __ballot_sync(~0u, wins); (winners & (winners - 1)) != 0)
      wins = id == __reduce_min_sync(~0u, wins ? id : 1 << 30);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) keys[j] = wins && place == j ? 0 : keys[j];
    return wins ? id : -1;
  }
};

// Returns a grouped rule's score for a logit, rounded to f32.
__device__ __forceinline__ float score_of(const RoutingRule& rule, float logit) {
  const double x = logit;
  if (rule.scoring == RouterScoring::kSigmoidGrouped) return static_cast<float>(1 / (1 + exp(-x)));
  return static_cast<float>(sqrt((x > 0 ? x : 0) + log1p(exp(-fabs(x)))));
}

// Returns in lanes 0 ... n - 1 the sum of the lanes' values, which are 0 in lanes n and up.
__device__ __forceinline__ double warp_sum(double v, int n) {
  int d = 16;
  while (d >= n) d /= 2;  // adding 0 changes nothing
  for (; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// The two best of some scores; NaN if there are fewer that are numbers.
struct TwoBest {
  float best = nanf(""), second = nanf("");

  __device__ __forceinline__ void add(float s) {
    if (s > best || (best != best && s == s)) {
      second = best, best = s;
    } else if (s > second || (second != second && s == s)) {
      second = s;
    }
  }
};

// Sets keys[g] for every group: a group's score is the sum of its two best scores, or its only score. Several
// lanes share a group if there are fewer groups than lanes.
__device__ __forceinline__ void put_group_keys(const float* scores, int groups, int size, uint32_t* keys) {
  const int lane = threadIdx.x % 32;
  int lanes = 32;  // of a group
  while (lanes * groups > 32 && lanes > 1) lanes /= 2;
  for (int first = 0; first < groups; first += 32 / lanes) {
    const int g = first + lane / lanes;
    TwoBest two;
    if (g < groups) {
      const int rotation = g * lanes % size;  // the groups' lanes read different banks
      for (int i = lane % lanes; i < size; i += lanes) {
        const int at = i + rotation;
        two.add(scores[g * size + (at < size ? at : at - size)]);
      }
    }
    for (int d = 1; d < lanes; d *= 2) {
      const float best = __shfl_xor_sync(~0u, two.best, d), second = __shfl_xor_sync(~0u, two.second, d);
      two.add(best);
      two.add(second);
    }
    if (g < groups && lane % lanes == 0) keys[g] = key_of(size == 1 ? two.best : two.best + two.second);
  }
  __syncwarp();
}

// Closes the candidates of all groups but the best ones. `room` is memory for one word per group.
template <int kPerLane>
__device__ __forceinline__ void keep_best_groups(const RoutingRule& rule, const float* scores, uint32_t* room,
                                                 Candidates<kPerLane>& all) {
  constexpr int kGroupsPerLane = kPerLane < kMaxRouterGroups / 32 ? kPerLane : kMaxRouterGroups / 32;
  const int groups = static_cast<int>(rule.num_groups), experts = static_cast<int>(rule.num_experts),
            size = experts / groups, lane = threadIdx.x % 32;
  put_group_keys(scores, groups, size, room);
  Candidates<kGroupsPerLane> best;
  best.load(room, groups);
  __syncwarp();
  for (int g = lane; g < groups; g += 32) room[g] = 0;
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < rule.top_k_groups; ++i)
    if (const int g = best.take_best(); g >= 0) room[g] = 1;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPerLane; ++j)
    if (const int i = j * 32 + lane; i < experts && room[i / size] == 0) all.keys[j] = 0;
}

// A lane's choice: `id`, in lane k, is the k-th expert; `first` is the best expert.
struct LaneChoice {
  int id = 0, first = 0;
};
// keys, scores: [E]; E <= 32 kPerLane.
template <int kPerLane>
__device__ __forceinline__ LaneChoice choose_ids(const RoutingRule& rule, const uint32_t* keys,
                                                 const float* scores, uint32_t* room) {
  Candidates<kPerLane> candidates;
  candidates.load(keys, static_cast<int>(rule.num_experts));
  if (is_grouped(rule.scoring) && rule.num_groups != rule.top_k_groups)
    keep_best_groups(rule, scores, room, candidates);
  __syncwarp();  // room has been read
  const int topk = static_cast<int>(rule.top_k), lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1  // in a model, the first use of an instruction waits for the L2
  for (int k = 0; k < topk; ++k)
    if (const int best = candidates.take_best(); best >= 0) room[k] = static_cast<uint32_t>(best);
  __syncwarp();
  return {static_cast<int>(room[min(lane, topk - 1)]), static_cast<int>(room[0])};
}

// Returns in lane k the weight of the k-th chosen expert. Called by all lanes.
__device__ __forceinline__ float weight_of(const RoutingRule& rule, const float* logits, int id, float top) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(rule.num_experts),
            topk = static_cast<int>(rule.top_k);
  const bool chosen = lane < topk;
  if (is_grouped(rule.scoring)) {
    const double score = chosen ? score_of(rule, logits[id]) : 0;
    const double divisor = rule.norm_top_k ? warp_sum(score, topk) + 1e-20 : 1;
    return static_cast<float>(score / divisor * rule.scaling_factor);
  }
  const double value = chosen ? exp(static_cast<double>(logits[id]) - top) : 0;
  const bool over_all = rule.scoring == RouterScoring::kSoftmaxTopk && !rule.norm_top_k;
  double sum = over_all ? 0 : value;
  if (over_all)
    for (int e = lane; e < experts; e += 32) sum += exp(static_cast<double>(logits[e]) - top);
  return static_cast<float>(value / warp_sum(sum, over_all ? 32 : topk) * rule.scaling_factor);
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

__device__ __forceinline__ void add_count(uint64_t* counts, int expert, uint32_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counts + expert), static_cast<unsigned long long>(n));
}

// The memory of a choice.
struct ChoiceMemory {
  uint32_t *keys, *room;   // [E], [kMaxRouterGroups]
  float *logits, *scores;  // [E]

  __device__ ChoiceMemory(const RoutingRule& rule, uint32_t* memory) : keys(memory) {
    const int experts = static_cast<int>(rule.num_experts);
    logits = reinterpret_cast<float*>(keys + experts), scores = logits + experts, room = keys + 3 * experts;
  }
  // Puts an expert's logit; any thread may do it.
  __device__ __forceinline__ void put(const RoutingRule& rule, int e, float logit) const {
    const bool grouped = is_grouped(rule.scoring);
    float score = grouped ? score_of(rule, logit) : logit;
    if (grouped && rule.correction_bias != nullptr) score += rule.correction_bias[e];
    logits[e] = logit, scores[e] = score, keys[e] = key_of(score);
  }
  // Puts every `threads`-th logit of a row; called by threads 0 ... threads - 1.
  __device__ __forceinline__ void put_row(const RoutingRule& rule, const float* row, int thread,
                                          int threads) const {
    for (int e = thread; e < rule.num_experts; e += threads) put(rule, e, row[e]);
  }
};

// A lane's slot: lane k has the k-th expert; lanes past K have none.
struct ChosenSlot {
  int id = -1;
  float weight = 0;
};

// Chooses the experts for row t, whose logits have been put: ids and weights [K], best first. Called by all
// lanes of a warp. The caller counts the experts.
__device__ __forceinline__ ChosenSlot choose_of(const RoutingRule& rule, const ChoiceMemory& m,
                                                const Choices& out, int64_t t) {
  const int lane = threadIdx.x % 32, topk = static_cast<int>(rule.top_k);
  const LaneChoice choice = rule.num_experts <= 32    ? choose_ids<1>(rule, m.keys, m.scores, m.room)
                            : rule.num_experts <= 256 ? choose_ids<8>(rule, m.keys, m.scores, m.room)
                                                      : choose_ids<32>(rule, m.keys, m.scores, m.room);
  const float weight = weight_of(rule, m.logits, choice.id, m.logits[choice.first]);
  if (lane >= topk) return {};
  out.ids[t * topk + lane] = choice.id;
  out.weights[t * topk + lane] = weight;
  return {choice.id, weight};
}

// Puts the logits [E], which can be in shared memory, and chooses. Called by all lanes of a warp.
__device__ __forceinline__ ChosenSlot choose_by_warp(const RoutingRule& rule, const float* logits,
                                                     uint32_t* memory, const Choices& out, int64_t t) {
  const ChoiceMemory room(rule, memory);
  room.put_row(rule, logits, static_cast<int>(threadIdx.x) % 32, 32);
  __syncwarp();
  return choose_of(rule, room, out, t);
}

}  // namespace fp4moe
