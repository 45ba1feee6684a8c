#include "io/checkpoint/expert_weights.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/run_ranges.h"
#include "io/checkpoint/finite_check.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/stored_experts.h"
#include "io/config/quant_config.h"

namespace fp4moe {
namespace {

std::string experts_prefix(int64_t layer) {
  return "model.layers." + std::to_string(layer) + ".mlp.experts.";
}

// Checks a tensor [E, ...], which holds the values of all experts, if it exists.
Status check_fused_finite(const Checkpoint& checkpoint, const std::string& name, ExpertRange local,
                          ThreadPool& pool) {
  const TensorEntry* tensor = checkpoint.find(name);
  if (tensor == nullptr) return {};
  const std::vector<int64_t>& shape = tensor->view.shape;
  const int64_t rows = shape.size() == 3 ? shape[1] : 1;  // per expert
  const int64_t first = std::min(local.first, shape[0]), count = std::min(local.count, shape[0] - first);
  return check_finite({tensor, first * rows, count * rows}, pool);
}

// Loads an expert whose projections are separate modules.
Result<ExpertWeightsView> load_one_expert(const Checkpoint& checkpoint, const ModelConfig& config,
                                          const std::string& expert, bool reads_scales) {
  const int64_t hidden = config.hidden_size, inter = config.intermediate_size;
  const auto load = [&](const char* name, int64_t rows, int64_t cols) {
    return load_fp4_projection(checkpoint, config.quant.method, expert + name, {rows, cols, reads_scales});
  };
  FP4MOE_ASSIGN_OR_RETURN(const Fp4Projection gate, load(".gate_proj", inter, hidden));
  FP4MOE_ASSIGN_OR_RETURN(const Fp4Projection up, load(".up_proj", inter, hidden));
  FP4MOE_ASSIGN_OR_RETURN(const Fp4Projection down, load(".down_proj", hidden, inter));
  return ExpertWeightsView{.gate = gate.weight,
                           .up = up.weight,
                           .down = down.weight,
                           .gate_input_scale = gate.input_scale,
                           .up_input_scale = up.input_scale,
                           .down_input_scale = down.input_scale};
}

// Loads dialects in which every projection of every expert is a separate module. Returns the error of the
// first expert that has one.
Result<MoeWeightsView> load_per_expert(const Checkpoint& checkpoint, const ModelConfig& config,
                                       const std::string& prefix, ExpertRange local, ThreadPool* pool) {
  MoeWeightsView moe{.format = is_mxfp4(config.quant.method) ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4,
                     .hidden_size = config.hidden_size,
                     .intermediate_size = config.intermediate_size,
                     .experts = std::vector<ExpertWeightsView>(static_cast<size_t>(config.num_experts)),
                     .bf16_experts = {}};
  std::vector<Status> statuses(moe.experts.size());
  run_ranges(pool, config.num_experts, 1, [&](int64_t e, int64_t) {
    auto expert = load_one_expert(checkpoint, config, prefix + std::to_string(e), local.contains(e));
    const auto at = static_cast<size_t>(e);
    if (expert.ok())
      moe.experts[at] = std::move(expert).value();
    else
      statuses[at] = expert.status();
  });
  for (const Status& status : statuses) FP4MOE_RETURN_IF_ERROR(status);
  return moe;
}

}  // namespace

Result<MoeWeightsView> load_expert_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                           int64_t layer, ExpertRange local, ThreadPool* pool) {
  FP4MOE_CHECK(layer >= 0 && layer < config.num_layers,
               "layer " + std::to_string(layer) + " of " + std::to_string(config.num_layers));
  if (!config.layer_has_experts.empty() && !config.layer_has_experts[static_cast<size_t>(layer)])
    return invalid_argument("layer " + std::to_string(layer) + " has a dense MLP and no experts");
  const QuantMethod method = config.quant.method;
  const std::string prefix = experts_prefix(layer);
  if (method == QuantMethod::kNone) return load_bf16_experts(checkpoint, config, prefix);
  const bool is_fused =
      method == QuantMethod::kMxfp4GptOss ||
      (method == QuantMethod::kModelOptNvfp4 && checkpoint.find(prefix + "gate_up_proj.weight") != nullptr);
  const std::string module = prefix + (is_fused ? "gate_up_proj" : "0.gate_proj");
  if (const TensorEntry* tensor = checkpoint.find(module + ".weight");
      tensor != nullptr && tensor->view.dtype == DType::kF8E4M3)
    return unsupported("module '" + module + "' is quantised to F8_E4M3; supported: experts in FP4");
  if (is_excluded(config.quant, module))
    return unsupported("module '" + module + "' is left unquantised by " + config.quant.declared_by +
                       "; supported: experts in FP4");
  if (method == QuantMethod::kMxfp4GptOss)
    return load_gpt_oss_experts(checkpoint, config, prefix, local, pool);
  if (is_fused) return load_fused_modelopt_experts(checkpoint, config, prefix, local, pool);
  return load_per_expert(checkpoint, config, prefix, local, pool);
}

Fp4Format stored_expert_format(const Checkpoint& checkpoint, const ModelConfig& config, int64_t layer) {
  const QuantMethod method = config.quant.method;
  if (method == QuantMethod::kMxfp4GptOss) return Fp4Format::kMxfp4;
  for (const char* module : {"0.gate_proj", "gate_up_proj"})
    if (has_fp4_tensors(checkpoint, method, experts_prefix(layer) + module))
      return is_mxfp4(method) ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4;
  return Fp4Format::kNone;
}

Result<MoeWeightsView> load_unquantised_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                                int64_t layer) {
  return load_bf16_experts(checkpoint, config, experts_prefix(layer));
}

Status check_experts_finite(const Checkpoint& checkpoint, const ModelConfig& config, int64_t layer,
                            ExpertRange local, bool with_matrices, ThreadPool& pool) {
  const std::string prefix = experts_prefix(layer);
  const bool is_bf16 = with_matrices && stored_expert_format(checkpoint, config, layer) == Fp4Format::kNone;
  if (config.family == ModelFamily::kGptOss)
    for (const char* name : {"gate_up_proj_bias", "down_proj_bias"})
      FP4MOE_RETURN_IF_ERROR(check_fused_finite(checkpoint, prefix + name, local, pool));
  if (!is_bf16) return {};
  for (const char* name : {"gate_up_proj", "down_proj"})
    FP4MOE_RETURN_IF_ERROR(check_fused_finite(checkpoint, prefix + name, local, pool));
  if (has_fused_bf16_experts(checkpoint, prefix)) return {};
  for (int64_t e = 0; e < config.num_experts; ++e)
    for (const char* name : {".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"})
      if (local.contains(e))
        FP4MOE_RETURN_IF_ERROR(check_finite({checkpoint.find(prefix + std::to_string(e) + name)}, pool));
  return {};
}

}  // namespace fp4moe
