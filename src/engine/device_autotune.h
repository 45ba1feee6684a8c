// The autotuner on a GPU: which tactic of the kernels' table runs a MoE layer of how many tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "fp4moe/config.h"
#include "io/expert_weights.h"
#include "kernels/device_moe.h"
#include "moe/plan.h"

namespace fp4moe {

// Numbers of tokens that have a tactic of their own: what decode steps are padded to, and powers of two up to
// the largest step.
std::vector<int64_t> tactic_buckets(const EngineConfig& flags);

// Seconds that a layer of num_tokens tokens takes with a tactic; negative if its output is wrong.
using DeviceTacticTimer = std::function<double(size_t tactic, int64_t num_tokens)>;

// For every bucket the fastest of the tactics that fit; the table's own choice where time runs out or none is
// 3% faster. `sizes`: of the experts, and topk.
DeviceTactics choose_tactics(const DeviceMoeOps& ops, DeviceMoeArgs sizes,
                             const std::vector<int64_t>& buckets, const DeviceTacticTimer& timer,
                             const std::function<bool()>& has_time);

// "few_tokens up to 4 tokens, sorted up to 8448".
std::string tactics_text(const DeviceMoeOps& ops, const DeviceTactics& tactics);

// The same timed on the GPU within `budget` seconds: one layer's experts, tokens that go to random ones,
// other ones in each call, so that weights come from memory. The output of every tactic is compared with that
// of the table's own choice before it is timed. Schemes w4a16 and w4a8, one rank.
Result<DeviceTactics> time_tactics(const MoePlan& plan, const MoeWeightsView& weights,
                                   const std::vector<int64_t>& buckets, double budget, ThreadPool& pool);

}  // namespace fp4moe
