#include "engine/autotune.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/log.h"
#include "comm/job.h"
#include "io/file.h"
#include "moe/expert_probe.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kExperts = 8;  // that are timed: enough that weights come from memory, as in a step
constexpr double kGain = 0.97;   // of the default's time that a challenger must not exceed
constexpr int kRounds = 3;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string default_cache() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache != nullptr && *cache != 0) return std::string(cache) + "/fp4moe/tactics.json";
  return home == nullptr || *home == 0 ? "" : std::string(home) + "/.cache/fp4moe/tactics.json";
}

int rank_threads(const EngineConfig& flags) {
  const int all = flags.threads > 0 ? flags.threads : available_cores();
  return std::max(1, all / std::max(1, flags.tp_size));
}

// Everything that times depend on.
std::string cache_key(const ModelPlan& plan) {
  const MoeProblem& p = plan.moe.problem();
  const auto n = [](int64_t x) { return std::to_string(x); };
  return cpu_model_name() + "; fp4moe " FP4MOE_VERSION "; " + runner_name(plan.moe) + "; " +
         fp4_format_name(p.format) + "; " + numerics_text(plan.moe.numerics()) + "; threads " +
         n(rank_threads(plan.flags)) + "; H " + n(p.hidden_size) + ", I " + n(p.local_intermediate().count) +
         ", L " + n(p.local_experts().count);
}

std::string tactics_text(const Tactics& tactics) {
  std::string text;
  for (const TacticOp op : {TacticOp::kGateUp, TacticOp::kDown}) {
    text += op == TacticOp::kGateUp ? "gate/up" : ", down";
    for (const int64_t rows : kTacticRows)
      text += (rows == kTacticRows[0] ? " " : "/") + std::to_string(tactics.chunk_bytes(op, rows) >> 10);
  }
  return text + " KiB a chunk at 1/4/32/more rows an expert";
}

// Times on one layer; the first of the model's that has experts.
class LayerTimer {
 public:
  static Result<LayerTimer> make(const Checkpoint& checkpoint, const ModelConfig& config,
                                 const ModelPlan& plan, ThreadPool& pool) {
    int64_t layer = 0;
    while (!config.layer_has_experts.empty() && !config.layer_has_experts[static_cast<size_t>(layer)])
      ++layer;
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView all, load_expert_weights(checkpoint, config, layer));
    MoeProblem problem = plan.moe.problem();
    std::vector<int64_t> chosen;
    for (int64_t e = 0; e < std::min(kExperts, problem.local_experts().count); ++e) chosen.push_back(e);
    problem.num_experts = static_cast<int64_t>(chosen.size());
    problem.top_k = 1;
    if (problem.layout.ep > 1) problem.layout = {};  // whole experts; else this rank's shard of each
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
      const std::span<const float> y = *probe_.run(rows, *pool_);  // a CPU's never fails
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
  std::vector<float> right_;  // the default's output
};

// The fastest of kRounds rounds by tactic; infinite for one that was wrong, empty if time ran out.
std::vector<double> time_all(const TacticTimer& timer, const std::function<bool()>& has_time, Tactics tactics,
                             size_t op, size_t bucket) {
  std::vector<double> best(kChunkBytes.size(), std::numeric_limits<double>::infinity());
  std::vector<bool> wrong(kChunkBytes.size(), false);
  for (int round = 0; round < kRounds; ++round)
    for (size_t i = 0; i < kChunkBytes.size(); ++i) {
      if (!has_time()) return {};
      tactics.chosen[op][bucket] = static_cast<uint8_t>(i);
      const double seconds = timer(tactics, kTacticRows[bucket]);
      if (seconds < 0) wrong[i] = true;
      best[i] = wrong[i] ? std::numeric_limits<double>::infinity() : std::min(best[i], seconds);
    }
  return best;
}

Result<nlohmann::json> read_cache(const std::string& path) {
  constexpr int64_t kMaxBytes = 1 << 20;
  if (!file_exists(path)) return nlohmann::json::object();
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxBytes));
  nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return data_loss("'" + path + "' is no JSON object");
  return root;
}

}  // namespace

Tactics choose_tactics(const TacticTimer& timer, const std::function<bool()>& has_time) {
  Tactics chosen;
  for (size_t bucket = 0; bucket < kTacticRows.size(); ++bucket)
    for (size_t op = 0; op < kNumTacticOps; ++op) {
      const std::vector<double> best = time_all(timer, has_time, chosen, op, bucket);
      if (best.empty()) return chosen;
      for (size_t i = 1; i < best.size(); ++i) {
        const size_t now = chosen.chosen[op][bucket];
        if (best[i] <= kGain * best[0] && best[i] < best[now])
          chosen.chosen[op][bucket] = static_cast<uint8_t>(i);
      }
    }
  return chosen;
}

Result<bool> read_tactics(const std::string& path, const std::string& key, Tactics& tactics) {
  FP4MOE_ASSIGN_OR_RETURN(const nlohmann::json root, read_cache(path));
  const auto entry = root.find(key);
  if (entry == root.end()) return false;
  const Status broken = data_loss("'" + path + "' holds no tactics under \"" + key + "\"");
  Tactics read;
  if (!entry->is_array() || entry->size() != kNumTacticOps) return broken;
  for (size_t op = 0; op < kNumTacticOps; ++op) {
    const nlohmann::json& row = (*entry)[op];
    if (!row.is_array() || row.size() != kTacticRows.size()) return broken;
    for (size_t bucket = 0; bucket < row.size(); ++bucket) {
      if (!row[bucket].is_number_unsigned() || row[bucket].get<uint64_t>() >= kChunkBytes.size())
        return broken;
      read.chosen[op][bucket] = row[bucket].get<uint8_t>();
    }
  }
  tactics = read;
  return true;
}

// Others may write at the same time: the last one's file stands whole, and what it lost is timed again.
Status write_tactics(const std::string& path, const std::string& key, const Tactics& tactics) {
  Result<nlohmann::json> old = read_cache(path);
  nlohmann::json root = old.ok() ? *old : nlohmann::json::object();
  root[key] = tactics.chosen;
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  return write_text_file(path, root.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

Result<TuneResult> autotune(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan) {
  const EngineConfig& flags = plan.flags;
  if (flags.disable_autotune || flags.autotune_budget <= 0) return TuneResult{{}, "off, shipped tactics"};
  if (plan.moe.problem().device != DeviceKind::kCpu)
    return TuneResult{{}, "not for a GPU, whose kernels choose by the batch's size"};
  if (plan.moe.problem().act_dtype == DType::kF32)
    return TuneResult{{}, "not for the oracle, shipped tactics"};
  if (launcher_info().num_processes > 1)
    return TuneResult{{}, "not in a job of several processes, shipped tactics"};
  const std::string path = flags.autotune_cache.empty() ? default_cache() : flags.autotune_cache;
  const std::string key = cache_key(plan);
  TuneResult result;
  if (!path.empty()) {
    const Result<bool> found = read_tactics(path, key, result.tactics);
    if (!found.ok()) log_warning("autotune cache ignored: " + found.status().message());
    if (found.ok() && *found) {
      result.note = tactics_text(result.tactics) + " (cached in " + path + ")";
      return result;
    }
  }
  const Clock::time_point start = Clock::now();
  ThreadPool pool(rank_threads(flags));
  FP4MOE_ASSIGN_OR_RETURN(LayerTimer timer, LayerTimer::make(checkpoint, config, plan, pool));
  result.tactics = choose_tactics([&](const Tactics& t, int64_t rows) { return timer(t, rows); },
                                  [&] { return seconds_since(start) < flags.autotune_budget; });
  const auto hundredths = static_cast<int64_t>(seconds_since(start) * 100);
  result.note = tactics_text(result.tactics) + " (timed in " + std::to_string(hundredths / 100) + "." +
                (hundredths % 100 < 10 ? "0" : "") + std::to_string(hundredths % 100) + " s)";
  if (path.empty()) return result;
  if (const Status written = write_tactics(path, key, result.tactics); !written.ok())
    log_warning("autotune cache not written: " + written.message());
  return result;
}

}  // namespace fp4moe
