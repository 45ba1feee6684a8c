#include "engine/startup/autotune.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/log.h"
#include "base/seconds.h"
#include "comm/job.h"
#include "device/device_info.h"
#include "engine/startup/device_autotune.h"
#include "engine/startup/fastest.h"
#include "engine/startup/kernels_id.h"
#include "engine/startup/tactic_cache.h"
#include "moe/expert_probe.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kExperts = 8;  // experts timed; enough for weights to be read from memory, as in a step

int rank_threads(const EngineConfig& flags) {
  const int all = flags.threads > 0 ? flags.threads : available_cores();
  return std::max(1, all / std::max(1, flags.tp_size));
}

// Returns a text with everything that the timings depend on.
std::string cache_key(const std::string& machine, const ModelPlan& plan) {
  const MoeProblem& p = plan.moe.problem();
  const auto n = [](int64_t x) { return std::to_string(x); };
  return machine + "; fp4moe " FP4MOE_VERSION ", kernels " + kernels_id() + "; " + runner_name(plan.moe) +
         "; " + fp4_format_name(p.format) + "; " + numerics_text(plan.moe.numerics()) + "; H " +
         n(p.hidden_size) + ", I " + n(p.local_intermediate().count) + ", L " + n(p.local_experts().count);
}

std::string cpu_cache_key(const ModelPlan& plan) {
  return cache_key(cpu_model_name() + "; threads " + std::to_string(rank_threads(plan.flags)), plan);
}

Result<std::string> gpu_cache_key(const ModelPlan& plan, const DeviceMoeOps& ops,
                                  const std::vector<int64_t>& buckets) {
  FP4MOE_ASSIGN_OR_RETURN(const DeviceInfo gpu, device_info(plan.gpu()));
  const std::string machine = gpu.name + ", " + std::to_string(gpu.num_sms) + " SMs; driver for CUDA " +
                              cuda_version_text(gpu.driver_version);
  std::string key =
      cache_key(machine, plan) + ", top-k " + std::to_string(plan.moe.problem().top_k) + "; tactics";
  for (const DeviceMoeTactic& tactic : ops.tactics) key += std::string(" ") + tactic.name;
  key += "; tokens";
  for (const int64_t tokens : buckets) key += " " + std::to_string(tokens);
  return key;
}

std::string tactics_text(const Tactics& tactics) {
  std::string text;
  for (const TacticOp op : {TacticOp::kGateUp, TacticOp::kDown}) {
    text += op == TacticOp::kGateUp ? "gate/up" : ", down";
    for (const int64_t rows : kTacticRows)
      text += (rows == kTacticRows[0] ? " " : "/") + std::to_string(tactics.chunk_bytes(op, rows) >> 10);
  }
  return text + " KiB per chunk at 1/4/32/more rows per expert";
}

int64_t first_expert_layer(const ModelConfig& config) {
  const auto& has = config.layer_has_experts;
  return has.empty() ? 0 : std::find(has.begin(), has.end(), true) - has.begin();
}

// Times tactics on one layer.
class LayerTimer {
 public:
  static Result<LayerTimer> make(const Checkpoint& checkpoint, const ModelConfig& config,
                                 const ModelPlan& plan, ThreadPool& pool) {
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView all,
                            load_expert_weights(checkpoint, config, first_expert_layer(config)));
    MoeProblem problem = plan.moe.problem();
    std::vector<int64_t> chosen;
    for (int64_t e = 0; e < std::min(kExperts, problem.local_experts().count); ++e) chosen.push_back(e);
    problem.num_experts = static_cast<int64_t>(chosen.size());
    problem.num_redundant = 0;
    problem.top_k = 1;
    if (problem.layout.ep > 1) problem.layout = {};  // whole experts; otherwise this rank's shard of each
    LayerTimer timer(pool);
    FP4MOE_ASSIGN_OR_RETURN(timer.probe_,
                            ExpertProbe::make(*plan.moe.runner(), problem, plan.moe.numerics(),
                                              choose_experts_of(all, chosen, plan.moe.numerics()),
                                              {.rows_per_expert = kTacticRows.back()}, pool));
    return timer;
  }

  double operator()(const Tactics& tactics, int64_t rows) {
    if (rows != rows_) {
      probe_.experts().tactics = {};
      const std::span<const float> y = *probe_.run(rows, *pool_);  // on a CPU run() never fails
      right_.assign(y.begin(), y.end());
      rows_ = rows;
    }
    probe_.experts().tactics = tactics;
    const Clock::time_point start = Clock::now();
    const std::span<const float> y = *probe_.run(rows, *pool_);
    const double seconds = seconds_since(start);
    return std::memcmp(y.data(), right_.data(), y.size_bytes()) == 0 ? seconds : -1;
  }

 private:
  explicit LayerTimer(ThreadPool& pool) : pool_(&pool) {}

  ThreadPool* pool_;
  ExpertProbe probe_;
  int64_t rows_ = 0;
  std::vector<float> right_;  // output of the default tactics
};

// Reads `tactics` from the cache or, if they are not in it, runs `time` and caches its result. Returns how
// the tactics were obtained.
template <class T>
Result<std::string> cached_or_timed(const EngineConfig& flags, const std::string& key, T& tactics,
                                    const std::function<Result<bool>(const std::string& path)>& read,
                                    const std::function<Status()>& time) {
  const std::string path = tactic_cache_path(flags);
  if (!path.empty()) {
    const Result<bool> found = read(path);
    if (!found.ok()) log_warning("autotune cache ignored: " + found.status().message());
    if (found.ok() && *found) return "cached in " + path;
  }
  const Clock::time_point start = Clock::now();
  FP4MOE_RETURN_IF_ERROR(time());
  char how[40];
  std::snprintf(how, sizeof how, "timed in %.2f s", seconds_since(start));
  if (path.empty()) return std::string(how);
  if (const Status written = write_tactics(path, key, tactics); !written.ok())
    log_warning("autotune cache not written: " + written.message());
  return std::string(how);
}

Result<TuneResult> autotune_cpu(const Checkpoint& checkpoint, const ModelConfig& config,
                                const ModelPlan& plan) {
  const std::string key = cpu_cache_key(plan);
  Tactics tactics;
  const auto read = [&](const std::string& path) { return read_tactics(path, key, tactics); };
  const auto time = [&]() -> Status {
    const Clock::time_point start = Clock::now();
    ThreadPool pool(rank_threads(plan.flags));
    FP4MOE_ASSIGN_OR_RETURN(LayerTimer timer, LayerTimer::make(checkpoint, config, plan, pool));
    tactics = choose_tactics([&](const Tactics& t, int64_t rows) { return timer(t, rows); },
                             [&] { return seconds_since(start) < plan.flags.autotune_budget; });
    return {};
  };
  FP4MOE_ASSIGN_OR_RETURN(const std::string how, cached_or_timed(plan.flags, key, tactics, read, time));
  return TuneResult{plan.moe.with_tactics(tactics), tactics_text(tactics) + " (" + how + ")"};
}

Result<TuneResult> autotune_gpu(const Checkpoint& checkpoint, const ModelConfig& config,
                                const ModelPlan& plan) {
  const DeviceMoeOps& ops = plan.moe.device_ops();
  DeviceTactics tactics{tactic_buckets(plan.flags), {}};
  FP4MOE_ASSIGN_OR_RETURN(const std::string key, gpu_cache_key(plan, ops, tactics.buckets));
  const auto read = [&](const std::string& path) {
    return read_tactics(path, key, ops.tactics.size(), tactics);
  };
  const auto time = [&]() -> Status {
    ThreadPool pool(rank_threads(plan.flags));
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView weights,
                            load_expert_weights(checkpoint, config, first_expert_layer(config)));
    FP4MOE_ASSIGN_OR_RETURN(
        tactics, time_tactics(plan.moe, weights, tactics.buckets, plan.flags.autotune_budget, pool));
    return {};
  };
  Result<std::string> how = cached_or_timed(plan.flags, key, tactics, read, time);
  if (!how.ok()) return how.status().with_context("autotune (--disable-autotune skips it)");
  return TuneResult{plan.moe.with_tactics(tactics), tactics_text(ops, tactics) + " (" + *how + ")"};
}

// Returns why nothing is timed, or an empty string if tactics are timed.
std::string why_shipped(const ModelPlan& plan) {
  const MoePlan& moe = plan.moe;
  if (plan.flags.disable_autotune || plan.flags.autotune_budget <= 0) return "off";
  if (moe.problem().act_dtype == DType::kF32) return "the oracle is not tuned";
  if (moe.problem().format == Fp4Format::kNone) return "bf16 experts are not tuned";
  if (launcher_info().num_processes > 1) return "jobs with several processes are not tuned";
  if (moe.problem().device == DeviceKind::kCpu) return "";
  if (moe.scheme() == Scheme::kW4A4) return std::string(scheme_name(moe.scheme())) + " is not tuned on a GPU";
  if (moe.a2a_settings().deterministic) return "deterministic inference uses one tactic for all batches";
  if (moe.device_ops().tactics.size() == 1) return std::string(moe.runner()->name) + " has only one tactic";
  return "";
}

}  // namespace

Tactics choose_tactics(const TacticTimer& timer, const std::function<bool()>& has_time) {
  constexpr std::array<size_t, kChunkBytes.size()> kAll = {0, 1, 2, 3};
  Tactics chosen;
  for (size_t bucket = 0; bucket < kTacticRows.size(); ++bucket)
    for (size_t op = 0; op < kNumTacticOps; ++op) {
      Tactics tried = chosen;
      const auto seconds = [&](size_t i) {
        tried.chosen[op][bucket] = static_cast<uint8_t>(i);
        return timer(tried, kTacticRows[bucket]);
      };
      const std::optional<size_t> best = fastest(kAll, 0, seconds, has_time);
      if (!best) return chosen;
      chosen.chosen[op][bucket] = static_cast<uint8_t>(*best);
    }
  return chosen;
}

Result<TuneResult> autotune(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan) {
  if (const std::string why = why_shipped(plan); !why.empty())
    return TuneResult{plan.moe, why + ", shipped tactics"};
  const bool is_cpu = plan.moe.problem().device == DeviceKind::kCpu;
  return is_cpu ? autotune_cpu(checkpoint, config, plan) : autotune_gpu(checkpoint, config, plan);
}

}  // namespace fp4moe
