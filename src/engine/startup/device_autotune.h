// The autotuner on a GPU: chooses a tactic from the kernels' table for each number of tokens in a MoE layer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "fp4moe/config.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/device_moe.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// Returns the numbers of tokens that get their own tactic: the sizes that decode steps are padded to, and
// powers of two up to the largest step.
std::vector<int64_t> tactic_buckets(const EngineConfig& flags);

// Returns the time in seconds that a layer takes for num_tokens tokens with a tactic; negative if its output
// is wrong.
using DeviceTacticTimer = std::function<double(size_t tactic, int64_t num_tokens)>;

// For every bucket, chooses the fastest tactic that fits, or the table's default if time runs out or no other
// tactic is at least 3% faster. `sizes`: dimensions of the experts, and topk.
DeviceTactics choose_tactics(const DeviceMoeOps& ops, DeviceMoeArgs sizes,
                             const std::vector<int64_t>& buckets, const DeviceTacticTimer& timer,
                             const std::function<bool()>& has_time);

// Returns text such as "few_tokens up to 4 tokens, sorted up to 8448".
std::string tactics_text(const DeviceMoeOps& ops, const DeviceTactics& tactics);

// Calls choose_tactics() with timings of one layer's experts on the GPU of the plan's rank, within `budget`
// seconds. Tokens are routed to random experts that change with every call, so that weights are read from
// memory. Every tactic's output is compared with that of the table's default before the tactic is timed. For
// schemes w4a16 and w4a8 on one rank.
Result<DeviceTactics> time_tactics(const MoePlan& plan, const MoeWeightsView& weights,
                                   const std::vector<int64_t>& buckets, double budget, ThreadPool& pool);

}  // namespace fp4moe
