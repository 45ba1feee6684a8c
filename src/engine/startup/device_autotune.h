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

// Numbers of tokens that get their own tactic: the sizes that decode steps are padded to, and powers of two
// up to the largest step.
std::vector<int64_t> tactic_buckets(const EngineConfig& flags);

// Time in seconds of a layer of num_tokens tokens with a tactic; negative if its output is wrong.
using DeviceTacticTimer = std::function<double(size_t tactic, int64_t num_tokens)>;

// Chooses the fastest tactic that fits for every bucket; the table's default if time runs out or no tactic is
// 3% faster. `sizes`: dimensions of the experts, and topk.
DeviceTactics choose_tactics(const DeviceMoeOps& ops, DeviceMoeArgs sizes,
                             const std::vector<int64_t>& buckets, const DeviceTacticTimer& timer,
                             const std::function<bool()>& has_time);

// "few_tokens up to 4 tokens, sorted up to 8448".
std::string tactics_text(const DeviceMoeOps& ops, const DeviceTactics& tactics);

// The same, timed on the GPU of the plan's rank within `budget` seconds: one layer's experts, with tokens
// routed to random experts that change with every call, so that weights come from memory. Every tactic's
// output is compared with that of the table's default before it is timed. Schemes w4a16 and w4a8, one rank.
Result<DeviceTactics> time_tactics(const MoePlan& plan, const MoeWeightsView& weights,
                                   const std::vector<int64_t>& buckets, double budget, ThreadPool& pool);

}  // namespace fp4moe
