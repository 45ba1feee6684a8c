#include "base/check.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/stored_experts.h"

namespace fp4moe {
namespace {

Result<std::vector<Bf16ExpertView>> load_fused(const Checkpoint& checkpoint, const ModelConfig& config,
                                               const std::string& prefix) {
  const int64_t experts = config.num_experts, h = config.hidden_size, i = config.intermediate_size;
  const auto get = [&](const char* name, std::vector<int64_t> shape) -> Result<const bf16*> {
    FP4MOE_ASSIGN_OR_RETURN(const TensorView view,
                            checkpoint.get(prefix + name, DType::kBF16, std::move(shape)));
    return view.as<bf16>();
  };
  FP4MOE_ASSIGN_OR_RETURN(const bf16* gate_up, get("gate_up_proj", {experts, h, 2 * i}));
  FP4MOE_ASSIGN_OR_RETURN(const bf16* gate_up_bias, get("gate_up_proj_bias", {experts, 2 * i}));
  FP4MOE_ASSIGN_OR_RETURN(const bf16* down, get("down_proj", {experts, i, h}));
  FP4MOE_ASSIGN_OR_RETURN(const bf16* down_bias, get("down_proj_bias", {experts, h}));
  std::vector<Bf16ExpertView> views;
  for (int64_t e = 0; e < experts; ++e) {
    const bf16* both = gate_up + e * h * 2 * i;
    views.push_back({.gate = {i, h, both, 2, 2 * i},
                     .up = {i, h, both + 1, 2, 2 * i},
                     .down = {h, i, down + e * i * h, 1, h},
                     .gate_bias = gate_up_bias + e * 2 * i,
                     .up_bias = gate_up_bias + e * 2 * i + 1,
                     .down_bias = down_bias + e * h,
                     .gate_up_bias_stride = 2});
  }
  return views;
}

Result<std::vector<Bf16ExpertView>> load_per_expert(const Checkpoint& checkpoint, const ModelConfig& config,
                                                    const std::string& prefix) {
  std::vector<Bf16ExpertView> views;
  for (int64_t e = 0; e < config.num_experts; ++e) {
    const auto get = [&](const char* name, int64_t rows, int64_t cols) -> Result<Bf16MatrixView> {
      const std::string tensor = prefix + std::to_string(e) + name + ".weight";
      FP4MOE_ASSIGN_OR_RETURN(const TensorView view, checkpoint.get(tensor, DType::kBF16, {rows, cols}));
      return Bf16MatrixView{rows, cols, view.as<bf16>(), cols, 1};
    };
    Bf16ExpertView expert;
    FP4MOE_ASSIGN_OR_RETURN(expert.gate, get(".gate_proj", config.intermediate_size, config.hidden_size));
    FP4MOE_ASSIGN_OR_RETURN(expert.up, get(".up_proj", config.intermediate_size, config.hidden_size));
    FP4MOE_ASSIGN_OR_RETURN(expert.down, get(".down_proj", config.hidden_size, config.intermediate_size));
    views.push_back(expert);
  }
  return views;
}

}  // namespace

Result<MoeWeightsView> load_bf16_experts(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const std::string& prefix) {
  for (const char* name : {"gate_up_proj_blocks", "0.gate_proj.weight_scale", "0.gate_proj.weight_packed"})
    if (checkpoint.find(prefix + name) != nullptr) return undeclared_fp4(prefix + name);
  MoeWeightsView moe{.format = Fp4Format::kNone,
                     .hidden_size = config.hidden_size,
                     .intermediate_size = config.intermediate_size,
                     .experts = {},
                     .bf16_experts = {}};
  FP4MOE_ASSIGN_OR_RETURN(moe.bf16_experts, config.family == ModelFamily::kGptOss
                                                ? load_fused(checkpoint, config, prefix)
                                                : load_per_expert(checkpoint, config, prefix));
  return moe;
}

}  // namespace fp4moe
