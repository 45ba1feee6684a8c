#include "io/write/quantize_declaration.h"

#include <algorithm>

#include "base/check.h"
#include "io/config/quant_config.h"
#include "io/config/tensor_names.h"

namespace fp4moe {
namespace {

// Returns the patterns under the names that the checkpoint stores.
Json join(Patterns always, const Patterns& more, const std::string& text_prefix) {
  always.insert(always.end(), more.begin(), more.end());
  for (std::string& pattern : always) pattern = stored_name(text_prefix, pattern);
  return always;
}

Result<std::string> choose_dialect(const ModelConfig& config, const QuantizeOptions& options) {
  const bool gpt_oss = config.family == ModelFamily::kGptOss, mx = options.format == Fp4Format::kMxfp4;
  if (gpt_oss && !mx)
    return unsupported(
        "--format nvfp4: no engine reads gpt-oss experts, which have biases, in NVFP4; nearest legal choice: "
        "--format mxfp4");
  const std::string fitting = gpt_oss ? "gpt-oss" : mx ? "compressed-tensors" : "modelopt";
  const std::string& asked = options.dialect;
  if (asked == "auto") return fitting;
  if (asked != "gpt-oss" && asked != "modelopt" && asked != "compressed-tensors")
    return invalid_argument("--dialect " + asked + "; legal: auto, gpt-oss, modelopt or compressed-tensors");
  if (asked == fitting || (asked == "compressed-tensors" && !gpt_oss)) return asked;
  return unsupported("--dialect " + asked + " cannot represent " + fp4_format_name(options.format) +
                     " for model type " + config.model_type + "; nearest legal choice: --dialect " + fitting);
}

// Returns a routed expert that the pattern matches, or "". All routed experts must have the same format.
std::string excluded_expert(const ModelConfig& config, const std::string& pattern) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (!config.layer_has_experts.empty() && !config.layer_has_experts[static_cast<size_t>(layer)]) continue;
    const std::string experts = "model.layers." + std::to_string(layer) + ".mlp.experts";
    if (config.family == ModelFamily::kGptOss && names_module(pattern, experts + ".gate_up_proj"))
      return experts;
    for (int64_t e = 0; e < config.num_experts; ++e)
      for (const char* name : {".gate_proj", ".up_proj", ".down_proj"})
        if (const std::string module = experts + "." + std::to_string(e) + name;
            names_module(pattern, module))
          return module;
  }
  return {};
}

// Returns patterns for the MTP layers, which stay unquantised because the engine skips them.
Patterns left_layers(const ModelConfig& config) {
  if (config.mtp_layer >= 0 && (config.num_mtp_layers > 0 || config.may_have_mtp_layer)) return {"mtp*"};
  Patterns patterns;
  for (int64_t i = 0; i < config.num_mtp_layers; ++i)
    patterns.push_back("model.layers." + std::to_string(config.num_layers + i) + "*");
  return patterns;
}

}  // namespace

bool Declaration::leaves(std::string_view module) const {
  return std::any_of(exclude.begin(), exclude.end(),
                     [&](const std::string& pattern) { return names_module(pattern, module); });
}

Json declare_gpt_oss() {
  return {{"quant_method", "mxfp4"},
          {"modules_to_not_convert",
           {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
}

Json declare_modelopt(Patterns exclude, bool has_inputs, const std::string& text_prefix) {
  for (const std::string& module : vision_modules(text_prefix)) exclude.push_back(module + "*");
  // Other engines recognise the dialect by its producer's name.
  return {{"producer", {{"name", "modelopt"}, {"version", "0.29.0"}}},
          {"quantization",
           {{"quant_algo", has_inputs ? "NVFP4" : "W4A16_NVFP4"},
            {"kv_cache_quant_algo", nullptr},
            {"group_size", 16},
            {"exclude_modules", join({"lm_head", "model.embed_tokens", "model.layers.*.self_attn*",
                                      "model.layers.*.linear_attn*", "model.layers.*.mlp.gate",
                                      "model.layers.*.mlp.shared_expert_gate"},
                                     exclude, text_prefix)}}}};
}

Json declare_compressed(bool is_mx, Patterns exclude, bool has_inputs, const std::string& text_prefix) {
  for (const std::string& module : vision_modules(text_prefix)) exclude.push_back("re:" + module + ".*");
  const Json weights = {{"num_bits", 4},
                        {"type", "float"},
                        {"strategy", is_mx ? "group" : "tensor_group"},
                        {"group_size", is_mx ? 32 : 16},
                        {"symmetric", true},
                        {"dynamic", false}};
  Json group = {{"targets", {"Linear"}}, {"weights", weights}};
  if (has_inputs) {
    Json inputs = weights;
    inputs["dynamic"] = "local";  // block scales at run time, tensor scales from the checkpoint
    group["input_activations"] = inputs;
  }
  return {{"quant_method", "compressed-tensors"},
          {"quantization_status", "compressed"},
          {"format", is_mx ? "mxfp4-pack-quantized" : "nvfp4-pack-quantized"},
          {"config_groups", {{"group_0", group}}},
          {"ignore", join({"lm_head", "re:.*self_attn.*", "re:.*linear_attn.*", "re:.*mlp.gate$",
                           "re:.*shared_expert_gate$"},
                          exclude, text_prefix)}};
}

Result<Declaration> declare(const ModelConfig& config, const QuantizeOptions& options) {
  if (config.quant.method != QuantMethod::kNone)
    return unsupported("the checkpoint is already quantised (" + config.quant.declared_by +
                       "); fp4moe quantize reads bf16 checkpoints");
  FP4MOE_CHECK(options.format != Fp4Format::kNone, "a format to quantise to");
  Declaration out;
  FP4MOE_ASSIGN_OR_RETURN(out.dialect, choose_dialect(config, options));
  for (const std::string& pattern : options.exclude)
    if (const std::string module = excluded_expert(config, pattern); !module.empty())
      return unsupported("--exclude '" + pattern + "' names '" + module +
                         "'; legal: all routed experts or none");
  const bool mx = options.format == Fp4Format::kMxfp4, has_inputs = !mx && options.input_amax != nullptr;
  out.exclude = options.exclude;
  Patterns patterns = left_layers(config);
  patterns.insert(patterns.end(), options.exclude.begin(), options.exclude.end());
  if (out.dialect == "gpt-oss") {
    if (!options.exclude.empty())
      return unsupported(
          "--exclude cannot be combined with --dialect gpt-oss, which quantises only routed experts");
    out.tensors = {.codes = "_blocks", .block_scales = "_scales", .is_gpt_oss = true};
    out.config = declare_gpt_oss();
  } else if (out.dialect == "modelopt") {
    out.tensors = {".weight", ".weight_scale", ".weight_scale_2", ".input_scale"};
    out.hf_quant = declare_modelopt(patterns, has_inputs, config.text_prefix);
    const Json& inner = out.hf_quant["quantization"];
    out.config = {{"quant_method", "modelopt"},
                  {"quant_algo", inner["quant_algo"]},
                  {"group_size", 16},
                  {"ignore", inner["exclude_modules"]},
                  {"producer", out.hf_quant["producer"]}};
  } else {
    out.tensors = {".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"};
    out.tensors.scales_are_divisors = true;
    out.config = declare_compressed(mx, patterns, has_inputs, config.text_prefix);
  }
  return out;
}

}  // namespace fp4moe
