#include "engine/startup/device_autotune.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <string_view>

#include "base/check.h"
#include "base/log.h"
#include "base/relative_l2.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "engine/ranks/batch_stage.h"
#include "engine/startup/fastest.h"
#include "model/resolve_flags.h"
#include "moe/device/device_experts.h"
#include "moe/local_experts.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kDraws = 8;              // number of random expert assignments for all tokens; one per call
constexpr int64_t kComparedTokens = 1024;  // maximum; the last tokens are compared
// Largest relative L2 error allowed between the outputs of two tactics. w4a16: the scheme's budget. w4a8:
// larger, because tactics that accumulate in 14 and in 24 bits quantise some values of the intermediate
// differently.
constexpr double kTolerance = 3e-3, kFp8Tolerance = 2e-2;

// Returns ids [kDraws, T, topk], distinct within a row.
std::vector<int32_t> draw_ids(int64_t num_tokens, int64_t topk, int64_t num_experts) {
  std::mt19937 random(1);
  std::vector<int32_t> ids;
  for (int64_t row = 0; row < kDraws * num_tokens; ++row) {
    const auto first = std::ssize(ids);
    while (std::ssize(ids) < first + topk) {
      const auto id = static_cast<int32_t>(random() % static_cast<uint32_t>(num_experts));
      if (std::find(ids.begin() + first, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

// Returns tokens [T, H] with variance 1: 64 distinct rows, repeated.
std::vector<bf16> draw_tokens(int64_t num_tokens, int64_t hidden_size) {
  constexpr int64_t kRows = 64;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<bf16> rows;
  for (int64_t i = 0; i < kRows * hidden_size; ++i) rows.push_back(float_to_bf16(normal(random)));
  std::vector<bf16> x;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const auto row = rows.begin() + t % kRows * hidden_size;
    x.insert(x.end(), row, row + hidden_size);
  }
  return x;
}

// One layer's experts and their input tokens in GPU memory.
class DeviceLayerTimer {
 public:
  static Result<DeviceLayerTimer> make(const MoePlan& plan, const MoeWeightsView& weights, int64_t max_tokens,
                                       ThreadPool& pool);
  // Times a tactic like a DeviceTacticTimer. Keeps the first error and then launches nothing more.
  double operator()(size_t tactic, int64_t num_tokens) {
    const StreamScope scope(stream_);
    const Result<double> seconds = failure_.ok() ? measure(tactic, num_tokens) : failure_;
    if (seconds.ok()) return *seconds;
    if (failure_.ok())
      failure_ =
          seconds.status().with_context(std::string("timing of MoE tactic ") + ops_->tactics[tactic].name);
    return -1;
  }
  const Status& failure() const { return failure_; }
  // With num_tokens = 0 only the sizes are meaningful.
  DeviceMoeArgs args(int64_t num_tokens, int64_t draw) const {
    return {.experts = experts_.tiles(),
            .x = x_.as<bf16>(),
            .ids = ids_.as<int32_t>() + draw * max_tokens_ * topk_,
            .num_tokens = num_tokens,
            .topk = topk_,
            .out = out_.as<float>(),
            .counters = counters_.data(),
            .workspace = workspace_.data()};
  }

 private:
  Result<double> measure(size_t tactic, int64_t num_tokens);
  Result<bool> is_right(size_t tactic, int64_t num_tokens);
  Result<std::vector<float>> output(size_t tactic, int64_t num_tokens);

  const DeviceMoeOps* ops_ = nullptr;
  Stream stream_;
  Event start_, end_;
  DeviceExperts experts_;
  int64_t max_tokens_ = 0, topk_ = 0;
  Buffer x_, ids_, out_, counters_, workspace_;
  int64_t compared_tokens_ = 0;  // number of tokens that expected_ was computed for
  std::vector<float> expected_;  // output of the table's default tactic
  std::vector<size_t> right_;    // tactics whose output matched expected_
  Status failure_;
};

Result<DeviceLayerTimer> DeviceLayerTimer::make(const MoePlan& plan, const MoeWeightsView& weights,
                                                int64_t max_tokens, ThreadPool& pool) {
  MemoryResource& memory = device_memory();
  const MoeProblem& p = plan.problem();
  DeviceLayerTimer timer;
  timer.ops_ = &plan.device_ops();
  timer.max_tokens_ = max_tokens;
  timer.topk_ = p.top_k;
  FP4MOE_ASSIGN_OR_RETURN(timer.stream_, Stream::make());
  FP4MOE_ASSIGN_OR_RETURN(timer.start_, Event::make());
  FP4MOE_ASSIGN_OR_RETURN(timer.end_, Event::make());
  const StreamScope scope(timer.stream_);
  const MoeWeightsView physical = physical_experts(weights, ExpertPlacement::trivial(p.placement_shape()));
  FP4MOE_ASSIGN_OR_RETURN(timer.experts_, DeviceExperts::make(p, plan.numerics(), physical, pool));
  const std::vector<bf16> x = draw_tokens(max_tokens, p.hidden_size);
  const std::vector<int32_t> ids = draw_ids(max_tokens, p.top_k, p.num_experts);
  const std::vector<uint8_t> zeros(kMoeCounterBytes);
  const int64_t elems = std::ssize(x);
  FP4MOE_ASSIGN_OR_RETURN(timer.x_, Buffer::copy_of(x.data(), elems * 2, memory));
  FP4MOE_ASSIGN_OR_RETURN(timer.ids_, Buffer::copy_of(ids.data(), std::ssize(ids) * 4, memory));
  FP4MOE_ASSIGN_OR_RETURN(timer.out_, Buffer::make(elems * 4, memory));
  FP4MOE_ASSIGN_OR_RETURN(timer.counters_, Buffer::copy_of(zeros.data(), kMoeCounterBytes, memory));
  FP4MOE_ASSIGN_OR_RETURN(
      timer.workspace_,
      Buffer::make(layer_workspace_bytes(*timer.ops_, timer.experts_.tiles(), max_tokens, p.top_k), memory));
  return timer;
}

Result<double> DeviceLayerTimer::measure(size_t tactic, int64_t num_tokens) {
  FP4MOE_ASSIGN_OR_RETURN(const bool right, is_right(tactic, num_tokens));
  if (!right) return -1.0;
  start_.record(stream_);
  for (int64_t draw = 0; draw < kDraws; ++draw) ops_->tactics[tactic].layer(args(num_tokens, draw));
  end_.record(stream_);
  FP4MOE_RETURN_IF_ERROR(stream_.synchronize());
  FP4MOE_ASSIGN_OR_RETURN(const double us, end_.microseconds_since(start_));
  return us * 1e-6 / kDraws;
}

Result<bool> DeviceLayerTimer::is_right(size_t tactic, int64_t num_tokens) {
  if (num_tokens != compared_tokens_) {
    FP4MOE_ASSIGN_OR_RETURN(expected_, output(ops_->default_tactic(args(num_tokens, 0)), num_tokens));
    compared_tokens_ = num_tokens;
    right_.clear();
  }
  if (std::find(right_.begin(), right_.end(), tactic) != right_.end()) return true;
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> actual, output(tactic, num_tokens));
  const double error = relative_l2(actual, expected_);
  if (error <= (experts_.numerics().is_fp8() ? kFp8Tolerance : kTolerance)) {
    right_.push_back(tactic);
    return true;
  }
  log_warning(std::string("autotune: MoE tactic ") + ops_->tactics[tactic].name +
              " has a relative error of " + std::to_string(error) + " at " + std::to_string(num_tokens) +
              " tokens and is not used there");
  return false;
}

// Returns the output for the last tokens; elements that the tactic does not write are NaN.
Result<std::vector<float>> DeviceLayerTimer::output(size_t tactic, int64_t num_tokens) {
  const int64_t h = experts_.tiles().hidden_size, rows = std::min(num_tokens, kComparedTokens);
  float* from = out_.as<float>() + (num_tokens - rows) * h;
  std::vector<float> y(static_cast<size_t>(rows * h), std::numeric_limits<float>::quiet_NaN());
  FP4MOE_RETURN_IF_ERROR(device_memory().upload(from, y.data(), rows * h * 4));
  ops_->tactics[tactic].layer(args(num_tokens, 0));
  FP4MOE_RETURN_IF_ERROR(stream_.synchronize());
  FP4MOE_RETURN_IF_ERROR(device_memory().download(y.data(), from, rows * h * 4));
  return y;
}

}  // namespace

std::vector<int64_t> tactic_buckets(const EngineConfig& flags) {
  const int64_t rows = rows_per_request(flags);
  const int64_t most = flags.max_prefill_tokens + flags.max_running_requests * rows;
  std::vector<int64_t> buckets = decode_buckets(flags.max_running_requests, flags.cuda_graph_bs, rows);
  int64_t tokens = 1;
  for (; tokens < most; tokens *= 2) buckets.push_back(tokens);
  buckets.push_back(most);
  std::sort(buckets.begin(), buckets.end());
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
  return buckets;
}

DeviceTactics choose_tactics(const DeviceMoeOps& ops, DeviceMoeArgs sizes,
                             const std::vector<int64_t>& buckets, const DeviceTacticTimer& timer,
                             const std::function<bool()>& has_time) {
  DeviceTactics tactics{buckets, {}};
  for (const int64_t tokens : buckets) {
    sizes.num_tokens = tokens;
    const size_t shipped = ops.default_tactic(sizes);
    std::vector<size_t> fit;
    for (size_t i = 0; i < ops.tactics.size(); ++i)
      if (ops.tactics[i].fits(sizes)) fit.push_back(i);
    const auto best = fit.size() == 1
                          ? shipped
                          : fastest(
                                fit, shipped, [&](size_t i) { return timer(i, tokens); }, has_time);
    tactics.chosen.push_back(static_cast<uint8_t>(best.value_or(shipped)));
  }
  return tactics;
}

std::string tactics_text(const DeviceMoeOps& ops, const DeviceTactics& tactics) {
  std::string text;
  for (size_t i = 0; i < tactics.chosen.size(); ++i) {
    if (i + 1 < tactics.chosen.size() && tactics.chosen[i + 1] == tactics.chosen[i]) continue;
    text += std::string(text.empty() ? "" : ", ") + ops.tactics[tactics.chosen[i]].name + " up to " +
            std::to_string(tactics.buckets[i]) + (text.empty() ? " tokens" : "");
  }
  return text;
}

Result<DeviceTactics> time_tactics(const MoePlan& plan, const MoeWeightsView& weights,
                                   const std::vector<int64_t>& buckets, double budget, ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(plan.problem().gpu()));
  const DeviceScope on_gpu(*gpu);
  FP4MOE_ASSIGN_OR_RETURN(DeviceLayerTimer timer,
                          DeviceLayerTimer::make(plan, weights, buckets.back(), pool));
  const auto start = std::chrono::steady_clock::now();
  const auto has_time = [&] {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    return spent.count() < budget && timer.failure().ok();
  };
  DeviceTactics tactics = choose_tactics(
      plan.device_ops(), timer.args(0, 0), buckets,
      [&](size_t tactic, int64_t num_tokens) { return timer(tactic, num_tokens); }, has_time);
  FP4MOE_RETURN_IF_ERROR(timer.failure());
  return tactics;
}

}  // namespace fp4moe
