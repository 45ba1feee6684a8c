#include "inspect/inspect_numerics.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/cpu_info.h"
#include "io/write/expert_statistics.h"
#include "model/plan_model.h"
#include "moe/expert_probe.h"

namespace fp4moe {
namespace {

using Report = nlohmann::ordered_json;

constexpr int64_t kRows = 4;    // per expert
constexpr int64_t kGroup = 8;   // number of experts packed at a time
constexpr double kFarOff = 64;  // factor from the layer's median beyond which an input scale is reported
constexpr uint8_t kE4m3Max = 0x7e, kE8m0Max = 0xfe;

// A scheme that the checkpoint supports, including w4a16.
struct Variant {
  std::string name;
  MoePlan plan;
};

std::vector<Variant> variants(const ModelConfig& config) {
  std::vector<Variant> found;
  for (const auto& [name, scheme, act_scales] : {std::tuple{"w4a16", "w4a16", "auto"},
                                                 {"w4a4", "w4a4", "static"},
                                                 {"w4a4_per_token", "w4a4", "per_token"},
                                                 {"w4a8", "w4a8", "auto"}}) {
    EngineConfig flags;
    flags.fp4_compute = scheme;
    flags.fp4_act_scales = act_scales;
    const Result<ModelPlan> plan = plan_model(config, flags);
    if (plan.ok()) found.push_back({name, plan->moe});
  }
  return found;
}

// Sums of squares over one expert's outputs: of the difference from w4a16, and of w4a16's outputs.
struct Energy {
  double difference = 0, norm = 0;

  void add(const Energy& other) {
    difference += other.difference;
    norm += other.norm;
  }
  double relative() const { return norm > 0 ? std::sqrt(difference / norm) : 0; }
};

Result<std::vector<float>> outputs(const MoePlan& plan, const MoeWeightsView& all,
                                   const std::vector<int64_t>& chosen, ThreadPool& pool) {
  MoeProblem problem = plan.problem();
  problem.num_experts = static_cast<int64_t>(chosen.size());
  problem.top_k = 1;
  FP4MOE_ASSIGN_OR_RETURN(
      ExpertProbe probe,
      ExpertProbe::make(*plan.runner(), problem, plan.numerics(),
                        choose_experts_of(all, chosen, plan.numerics()), {.rows_per_expert = kRows}, pool));
  FP4MOE_ASSIGN_OR_RETURN(const std::span<const float> y, probe.run(kRows, pool));
  return std::vector<float>(y.begin(), y.end());
}

// Returns [variant][expert]: the distance of the outputs from those of the first variant (w4a16).
Result<std::vector<std::vector<Energy>>> measure(const std::vector<Variant>& ways, const MoeWeightsView& all,
                                                 ThreadPool& pool) {
  const auto num_experts = static_cast<int64_t>(all.experts.size());
  std::vector<std::vector<Energy>> energies(ways.size());
  for (int64_t first = 0; first < num_experts; first += kGroup) {
    std::vector<int64_t> chosen;
    for (int64_t e = first; e < std::min(num_experts, first + kGroup); ++e) chosen.push_back(e);
    std::vector<float> exact;
    for (size_t way = 0; way < ways.size(); ++way) {
      FP4MOE_ASSIGN_OR_RETURN(std::vector<float> y, outputs(ways[way].plan, all, chosen, pool));
      if (way == 0) exact = y;
      const size_t each = y.size() / chosen.size();
      for (size_t e = 0; e < chosen.size(); ++e) {
        Energy energy;
        for (size_t i = e * each; i < (e + 1) * each; ++i) {
          const double d = static_cast<double>(y[i]) - exact[i];
          energy.difference += d * d;
          energy.norm += static_cast<double>(exact[i]) * exact[i];
        }
        energies[way].push_back(energy);
      }
    }
  }
  return energies;
}

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

Report matrix_report(const Fp4MatrixView& m, float input_scale) {
  Fp4Statistics statistics;
  statistics.add(m);
  const int64_t blocks = m.cols / fp4_block(m.format);
  const uint8_t largest = m.format == Fp4Format::kNvfp4 ? kE4m3Max : kE8m0Max;
  int64_t saturated = 0;
  for (int64_t r = 0; r < m.rows; ++r)
    saturated += std::count(m.scales + r * m.scale_stride_bytes, m.scales + r * m.scale_stride_bytes + blocks,
                            largest);
  return {{"tensor_scale", m.tensor_scale},
          {"input_scale", input_scale},
          {"saturated_codes", share(statistics.num_saturated(), m.rows * m.cols)},
          {"saturated_scales", share(saturated, m.rows * blocks)},
          {"zero_blocks", share(statistics.num_zero_blocks, statistics.num_blocks)}};
}

std::string scales_text(const char* what, float a, float b) {
  char text[128];
  std::snprintf(text, sizeof text, "%s %.4g, %.4g", what, static_cast<double>(a), static_cast<double>(b));
  return text;
}

// Describes an expert's unusual scales.
Report odd_scales(const ExpertWeightsView& e, float median) {
  Report odd = Report::array();
  if (e.gate.rows > 0 && e.gate.tensor_scale != e.up.tensor_scale)
    odd.push_back(scales_text("gate and up tensor scales differ:", e.gate.tensor_scale, e.up.tensor_scale));
  if (e.gate.rows > 0 && e.gate_input_scale != e.up_input_scale)
    odd.push_back(scales_text("gate and up input scales differ:", e.gate_input_scale, e.up_input_scale));
  if (e.up_input_scale > kFarOff * median || e.up_input_scale * kFarOff < median)
    odd.push_back(scales_text("input scale far from the layer's median:", e.up_input_scale, median));
  return odd;
}

float median_input_scale(const MoeWeightsView& moe) {
  std::vector<float> scales;
  for (const ExpertWeightsView& e : moe.experts) scales.push_back(e.up_input_scale);
  std::nth_element(scales.begin(), scales.begin() + static_cast<std::ptrdiff_t>(scales.size() / 2),
                   scales.end());
  return scales[scales.size() / 2];
}

// Returns the number of missing input scales, which the loader sets to 1.
int64_t missing_input_scales(const MoeWeightsView& moe) {
  int64_t missing = 0;
  for (const ExpertWeightsView& e : moe.experts)
    missing += (e.gate_input_scale == 1) + (e.up_input_scale == 1) + (e.down_input_scale == 1);
  return missing;
}

Result<Report> layer_report(int64_t layer, const MoeWeightsView& moe, const std::vector<Variant>& ways,
                            ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(const auto energies, measure(ways, moe, pool));
  std::vector<Energy> totals(ways.size());
  ExpertStatistics statistics;
  Report experts = Report::array();
  const float median = median_input_scale(moe);
  for (size_t e = 0; e < moe.experts.size(); ++e) {
    const ExpertWeightsView& expert = moe.experts[e];
    statistics.add(expert);
    Report errors = Report::object();
    for (size_t way = 1; way < ways.size(); ++way) {
      errors[ways[way].name] = energies[way][e].relative();
      totals[way].add(energies[way][e]);
    }
    Report row = {{"expert", e}, {"errors", errors}};
    if (expert.gate.rows > 0) row["gate"] = matrix_report(expert.gate, expert.gate_input_scale);
    row["up"] = matrix_report(expert.up, expert.up_input_scale);
    row["down"] = matrix_report(expert.down, expert.down_input_scale);
    row["odd"] = odd_scales(expert, median);
    experts.push_back(std::move(row));
  }
  Report errors = Report::object();
  for (size_t way = 1; way < ways.size(); ++way) errors[ways[way].name] = totals[way].relative();
  return Report{{"layer", layer},
                {"format", fp4_format_name(moe.format)},
                {"errors", errors},
                {"missing_input_scales", moe.format == Fp4Format::kNvfp4 ? missing_input_scales(moe) : 0},
                {"gate_up_scale_mismatches", statistics.num_gate_up_mismatches},
                {"experts", experts}};
}

}  // namespace

Result<Report> numerics_report(const Checkpoint& checkpoint, const ModelConfig& config, int64_t layer) {
  const std::vector<Variant> ways = variants(config);
  if (ways.empty()) return plan_model(config, {}).status();
  if (layer >= config.num_layers)
    return invalid_argument("--layer " + std::to_string(layer) + " must be between 0 and " +
                            std::to_string(config.num_layers - 1));
  const auto has_experts = [&](int64_t i) {
    return config.layer_has_experts.empty() || config.layer_has_experts[static_cast<size_t>(i)];
  };
  if (layer >= 0 && !has_experts(layer))
    return invalid_argument("--layer " + std::to_string(layer) + ": this layer has no experts");
  ThreadPool pool(available_cores());
  Report layers = Report::array();
  for (int64_t i = 0; i < config.num_layers; ++i) {
    if (!has_experts(i) || (layer >= 0 && layer != i)) continue;
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView moe, load_expert_weights(checkpoint, config, i));
    FP4MOE_ASSIGN_OR_RETURN(Report report, layer_report(i, moe, ways, pool));
    layers.push_back(std::move(report));
  }
  return layers;
}

void print_numerics(const Report& layers) {
  for (const Report& layer : layers) {
    std::printf("layer %" PRId64 " %s:", layer["layer"].get<int64_t>(),
                layer["format"].get<std::string>().c_str());
    for (const auto& [scheme, error] : layer["errors"].items())
      std::printf(" %s %.3g", scheme.c_str(), error.get<double>());
    double codes = 0, scales = 0;
    size_t worst = 0;
    std::vector<double> errors;
    for (const Report& expert : layer["experts"]) {
      for (const char* name : {"gate", "up", "down"}) {
        if (!expert.contains(name)) continue;
        codes = std::max(codes, expert[name]["saturated_codes"].get<double>());
        scales = std::max(scales, expert[name]["saturated_scales"].get<double>());
      }
      double largest = 0;
      for (const auto& [scheme, error] : expert["errors"].items())
        largest = std::max(largest, error.get<double>());
      errors.push_back(largest);
      if (largest > errors[worst]) worst = errors.size() - 1;
    }
    std::printf(" (relative L2 error against w4a16); largest %.3g in expert %zu\n",
                errors.empty() ? 0.0 : errors[worst], worst);
    std::printf("  saturated codes up to %.2f%%, block scales up to %.3f%%; %" PRId64
                " input scales missing (1.0 is used); gate and up scales differ in %" PRId64 " experts\n",
                100 * codes, 100 * scales, layer["missing_input_scales"].get<int64_t>(),
                layer["gate_up_scale_mismatches"].get<int64_t>());
    for (const Report& expert : layer["experts"])
      for (const Report& odd : expert["odd"])
        std::printf("  expert %" PRId64 ": %s\n", expert["expert"].get<int64_t>(),
                    odd.get<std::string>().c_str());
  }
}

}  // namespace fp4moe
