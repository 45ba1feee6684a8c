// Loads linear layers outside the routed experts.
#include "base/check.h"
#include "io/checkpoint/expert_weights.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/fp8_tensors.h"
#include "io/config/quant_config.h"

namespace fp4moe {
namespace {

// Gives a clearer error than a dtype mismatch for weights in an unsupported format.
Status check_dense_dtype(const Checkpoint& checkpoint, const std::string& name) {
  const TensorEntry* entry = checkpoint.find(name + ".weight");
  if (entry == nullptr || entry->view.dtype == DType::kBF16) return {};
  const DType dtype = entry->view.dtype;
  if (dtype == DType::kU8 && checkpoint.find(name + ".weight_scale") != nullptr)
    return undeclared_fp4(name + ".weight_scale");
  const std::string what = "module '" + name + "' is quantised to " + dtype_name(dtype);
  if (dtype == DType::kF8E4M3)
    return unsupported(what + " and has no scale; legal: '" + name +
                       ".weight_scale_inv', '.weight_scale' or '" + ".scale'");
  if (dtype != DType::kF8E5M2 && dtype != DType::kI8) return {};
  return unsupported(what + "; supported: linear layers in FP4, F8_E4M3 and bf16");
}

// Fails for FP8 tensors in a checkpoint without a declaration.
Status check_declares_fp8(const QuantConfig& quant, const std::string& tensor) {
  if (quant.method != QuantMethod::kNone) return {};
  return unsupported("'" + tensor +
                     "' is FP8, but the checkpoint declares no quantization (neither in "
                     "config.json's quantization_config nor in hf_quant_config.json)");
}

Status check_one_format(const std::string& prefix, const LinearWeightsView& gate,
                        const LinearWeightsView& other) {
  const bool same = gate.is_fp4 == other.is_fp4 && gate.is_fp8() == other.is_fp8() &&
                    (!gate.is_fp4 || gate.fp4.format == other.fp4.format);
  if (same) return {};
  return unsupported("module '" + prefix +
                     "' mixes FP4, FP8 or bf16 projections; supported: all in one format");
}

}  // namespace

Result<LinearWeightsView> load_linear_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                              const std::string& name, int64_t n, int64_t k, bool has_bias) {
  const QuantMethod method = config.quant.method;
  LinearWeightsView linear;
  linear.n = n;
  linear.k = k;
  linear.is_fp4 = has_fp4_tensors(checkpoint, method, name);
  if (linear.is_fp4) {
    if (is_excluded(config.quant, name))
      return invalid_argument("module '" + name + "' has FP4 tensors, but " + config.quant.declared_by +
                              " leaves it unquantised");
    FP4MOE_ASSIGN_OR_RETURN(const Fp4Projection fp4, load_fp4_projection(checkpoint, method, name, {n, k}));
    linear.fp4 = fp4.weight;
    linear.input_scale = fp4.input_scale;
  } else if (const TensorEntry* scales = find_fp8_scales(checkpoint, name); scales != nullptr) {
    FP4MOE_RETURN_IF_ERROR(check_declares_fp8(config.quant, scales->name));
    FP4MOE_ASSIGN_OR_RETURN(Fp8Matrix fp8, load_fp8_matrix(checkpoint, name, n, k));
    linear.fp8 = fp8.view;
    linear.fp8_scales = std::move(fp8.scales);
    linear.weight_tensor = checkpoint.find(name + ".weight");
  } else {
    FP4MOE_RETURN_IF_ERROR(check_dense_dtype(checkpoint, name));
    FP4MOE_ASSIGN_OR_RETURN(const TensorView weight, checkpoint.get(name + ".weight", DType::kBF16, {n, k}));
    linear.weight = weight.as<bf16>();
    linear.weight_tensor = checkpoint.find(name + ".weight");
  }
  if (has_bias) {
    FP4MOE_ASSIGN_OR_RETURN(const TensorView bias, checkpoint.get(name + ".bias", DType::kBF16, {n}));
    linear.bias = bias.as<bf16>();
    linear.bias_tensor = checkpoint.find(name + ".bias");
  }
  return linear;
}

Result<MlpWeightsView> load_mlp_weights(const Checkpoint& checkpoint, const ModelConfig& config,
                                        const std::string& prefix, int64_t intermediate_size) {
  const int64_t hidden = config.hidden_size;
  MlpWeightsView mlp;
  mlp.hidden_size = hidden;
  mlp.intermediate_size = intermediate_size;
  FP4MOE_ASSIGN_OR_RETURN(
      mlp.gate, load_linear_weights(checkpoint, config, prefix + ".gate_proj", intermediate_size, hidden));
  FP4MOE_ASSIGN_OR_RETURN(
      mlp.up, load_linear_weights(checkpoint, config, prefix + ".up_proj", intermediate_size, hidden));
  FP4MOE_ASSIGN_OR_RETURN(
      mlp.down, load_linear_weights(checkpoint, config, prefix + ".down_proj", hidden, intermediate_size));
  FP4MOE_RETURN_IF_ERROR(check_one_format(prefix, mlp.gate, mlp.up));
  FP4MOE_RETURN_IF_ERROR(check_one_format(prefix, mlp.gate, mlp.down));
  return mlp;
}

}  // namespace fp4moe
