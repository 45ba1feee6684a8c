#include "engine/startup/self_test.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/log.h"
#include "base/relative_l2.h"
#include "moe/expert_probe.h"

namespace fp4moe {
namespace {

constexpr int64_t kRows = 2;         // per expert
constexpr int64_t kFastExperts = 4;  // number of experts that the fast test uses, all in one layer; also the
                                     // number tested at a time

std::string text(double x) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.2e", x);
  return digits;
}

// Returns a problem with one rank that holds `num_experts` experts, and with one expert per token.
MoeProblem alone(const MoePlan& plan, size_t num_experts) {
  MoeProblem problem = plan.problem();
  problem.layout = {};
  problem.num_experts = static_cast<int64_t>(num_experts);
  problem.num_redundant = 0;
  problem.top_k = 1;
  return problem;
}

std::vector<int64_t> experts_to_test(int64_t num_experts, bool full) {
  const int64_t n = full ? num_experts : std::min(num_experts, kFastExperts);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < n; ++i) chosen.push_back(n == 1 ? 0 : i * (num_experts - 1) / (n - 1));
  return chosen;
}

std::vector<int64_t> layers_to_test(const ModelConfig& config, bool full) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < config.num_layers; ++i)
    if (config.layer_has_experts.empty() || config.layer_has_experts[static_cast<size_t>(i)])
      layers.push_back(i);
  if (!full && !layers.empty()) layers = {layers[layers.size() / 2]};
  return layers;
}

}  // namespace

double self_test_budget(const Numerics& numerics) {
  if (numerics.scheme == Scheme::kW4A4) return 2e-2;
  return numerics.is_fp8() ? 5e-3 : 3e-3;
}

Status compare_experts(std::span<const float> y, std::span<const float> reference,
                       const std::vector<int64_t>& names, const RunnerRow& runner, const Numerics& numerics,
                       SelfTestReport& report) {
  const double budget = self_test_budget(numerics);
  const size_t each = y.size() / names.size();
  for (size_t i = 0; i < names.size(); ++i) {
    const double error = relative_l2(y.subspan(i * each, each), reference.subspan(i * each, each));
    if (!(error <= budget))
      return {StatusCode::kInternal, "expert " + std::to_string(names[i]) + " run by " + runner.name + " (" +
                                         numerics_text(numerics) + ") differs from the oracle by " +
                                         (std::isinf(error) ? "values that are not finite" : text(error)) +
                                         "; budget " + text(budget) + " relative L2"};
    report.worst_error = std::max(report.worst_error, error);
    ++report.num_experts;
  }
  return {};
}

Status compare_with_oracle(const MoePlan& plan, const MoeWeightsView& tested, const MoeWeightsView& oracle,
                           const std::vector<int64_t>& names, ThreadPool& pool, SelfTestReport& report) {
  FP4MOE_CHECK(tested.experts.size() == names.size() && oracle.experts.size() == names.size(),
               "both sides need one name per expert");
  const BatchLayout layout =
      plan.a2a()->layouts.has(BatchLayout::kPacked) ? BatchLayout::kPacked : BatchLayout::kMasked;
  const ProbeShape shape = {.layout = layout, .rows_per_expert = kRows};
  const MoeProblem problem = alone(plan, names.size());
  FP4MOE_ASSIGN_OR_RETURN(ExpertProbe actual,
                          ExpertProbe::make(*plan.runner(), problem, plan.numerics(), tested, shape, pool));
  FP4MOE_ASSIGN_OR_RETURN(ExpertProbe expected, ExpertProbe::make(oracle_row(plan.numerics()), problem,
                                                                  plan.numerics(), oracle, shape, pool));
  FP4MOE_ASSIGN_OR_RETURN(const std::span<const float> y, actual.run(kRows, pool));
  FP4MOE_ASSIGN_OR_RETURN(const std::span<const float> reference, expected.run(kRows, pool));
  return compare_experts(y, reference, names, *plan.runner(), plan.numerics(), report);
}

Result<SelfTestReport> self_test(const Checkpoint& checkpoint, const ModelConfig& config,
                                 const ModelPlan& plan, ThreadPool& pool) {
  const bool full = plan.flags.self_test == "full";
  SelfTestReport report;
  for (const int64_t layer : layers_to_test(config, full)) {
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView all, load_expert_weights(checkpoint, config, layer));
    FP4MOE_RETURN_IF_ERROR(check_experts_finite(checkpoint, config, layer, {}, true, pool));
    const std::vector<int64_t> chosen = experts_to_test(static_cast<int64_t>(all.experts.size()), full);
    // Testing a few experts at a time limits the memory needed to part of a layer.
    for (size_t first = 0; first < chosen.size(); first += kFastExperts) {
      const size_t last = std::min(chosen.size(), first + kFastExperts);
      const std::vector<int64_t> names(chosen.begin() + static_cast<std::ptrdiff_t>(first),
                                       chosen.begin() + static_cast<std::ptrdiff_t>(last));
      const MoeWeightsView some = choose_experts_of(all, names, plan.moe.numerics());
      FP4MOE_RETURN_IF_ERROR(compare_with_oracle(plan.moe, some, some, names, pool, report)
                                 .with_context("self-test failed: layer " + std::to_string(layer)));
    }
    ++report.num_layers;
  }
  return report;
}

Status run_self_test(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                     const std::string& whose) {
  if (plan.flags.self_test == "off") return {};
  if (plan.moe.problem().format == Fp4Format::kNone) {
    log_info("self-test: no FP4 experts to test");
    return {};
  }
  const auto start = std::chrono::steady_clock::now();
  ThreadPool pool(plan.flags.threads > 0 ? plan.flags.threads : available_cores());
  FP4MOE_ASSIGN_OR_RETURN(const SelfTestReport report, self_test(checkpoint, config, plan, pool));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  char time[32];
  std::snprintf(time, sizeof time, "%.2f s", seconds.count());
  log_info("self-test " + plan.flags.self_test + ": " + std::to_string(report.num_experts) + " experts of " +
           whose + std::to_string(report.num_layers) + " layers run by " + runner_name(plan.moe) +
           " against the oracle, largest error " + text(report.worst_error) + ", budget " +
           text(self_test_budget(plan.moe.numerics())) + ", " + time);
  return {};
}

}  // namespace fp4moe
