#include "io/config/model_config.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "io/checkpoint/mtp_layers.h"
#include "io/config/model_families.h"
#include "io/config/quant_config.h"
#include "io/file.h"
#include "io/json_fields.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;

struct FamilyRow {
  ModelFamily family;
  const char* model_type;
  const char* architecture;
  const char* experts_key;
  const char* expert_width_key;  // I of one expert
  // The defaults of the stock transformers class for keys that the file lacks.
  double rms_norm_eps;
  int64_t num_kv_heads;  // 0: same as num_attention_heads (latent attention has no KV heads)
  double rope_theta;
  int32_t eos_token_id;  // -1: none
};

constexpr FamilyRow kFamilies[] = {
    {ModelFamily::kGptOss, "gpt_oss", "GptOssForCausalLM", "num_local_experts", "intermediate_size", 1e-5, 8,
     150000, -1},
    {ModelFamily::kDeepseekV3, "deepseek_v3", "DeepseekV3ForCausalLM", "n_routed_experts",
     "moe_intermediate_size", 1e-6, 0, 10000, 1},
    {ModelFamily::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", "num_experts", "moe_intermediate_size", 1e-6,
     4, 10000, -1},
    {ModelFamily::kQwen2Moe, "qwen2_moe", "Qwen2MoeForCausalLM", "num_experts", "moe_intermediate_size", 1e-6,
     16, 10000, -1},
};

Result<const FamilyRow*> find_family(JsonFields& fields, ModelConfig& config) {
  std::vector<std::string> architectures;
  fields.read_string("model_type", config.model_type);
  fields.read_strings("architectures", architectures);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (!architectures.empty()) config.architecture = architectures[0];
  std::string supported;
  for (const FamilyRow& row : kFamilies) {
    const bool same_architecture = config.architecture.empty() || config.architecture == row.architecture;
    if (config.model_type == row.model_type && same_architecture) return &row;
    supported += std::string(supported.empty() ? "" : ", ") + row.architecture + " (model_type " +
                 row.model_type + ")";
  }
  return unsupported("config.json: architecture '" + config.architecture + "' with model_type '" +
                     config.model_type + "' is not supported; supported: " + supported);
}

void read_dense_dtype(JsonFields& fields, ModelConfig& config) {
  struct Row {
    const char* name;
    DType dtype;
  };
  constexpr Row kRows[] = {{"bfloat16", DType::kBF16}, {"float16", DType::kF16}, {"float32", DType::kF32}};
  std::string name = "bfloat16";
  fields.read_string("torch_dtype", name);
  fields.read_string("dtype", name);  // the newer spelling
  for (const Row& row : kRows)
    if (name == row.name) {
      config.dense_dtype = row.dtype;
      return;
    }
  fields.require(false, "torch_dtype = '" + name + "'; legal: bfloat16, float16, float32");
}

void read_sizes(JsonFields& fields, const FamilyRow& row, ModelConfig& config) {
  const char* experts_key = row.experts_key;
  if (!fields.has(experts_key) && fields.has("num_local_experts")) experts_key = "num_local_experts";
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
        "max_position_embeddings", experts_key, row.expert_width_key})
    fields.require_key(key);
  fields.read_int("vocab_size", config.vocab_size, kVocab);
  fields.read_int("hidden_size", config.hidden_size, kWidths);
  fields.read_int("num_hidden_layers", config.num_layers, kLayers);
  fields.read_int("num_attention_heads", config.num_heads, kHeads);
  const bool has_default = row.num_kv_heads > 0 && !fields.contains("num_key_value_heads");
  config.num_kv_heads = has_default ? row.num_kv_heads : config.num_heads;
  fields.read_int("num_key_value_heads", config.num_kv_heads, kHeads);
  fields.read_int("max_position_embeddings", config.max_position_embeddings, kPositions);
  fields.read_int(experts_key, config.num_experts, kExperts);
  fields.read_int("num_experts_per_tok", config.top_k, kExperts);
  fields.read_int(row.expert_width_key, config.intermediate_size, kWidths);
  config.rms_norm_eps = row.rms_norm_eps;
  config.rope.theta = row.rope_theta;
  fields.read_real("rms_norm_eps", config.rms_norm_eps, {1e-30, 1});
  fields.read_bool("tie_word_embeddings", config.tie_word_embeddings);
  config.attention_bias = row.family == ModelFamily::kGptOss;
  fields.read_bool("attention_bias", config.attention_bias);
  std::string activation = "silu";
  fields.read_string("hidden_act", activation);
  fields.require(activation == "silu", "hidden_act = '" + activation + "'; legal: silu");
  bool weight_on_input = false;
  fields.read_bool("apply_router_weight_on_input", weight_on_input);
  if (weight_on_input)
    fields.fail(unsupported(
        "config.json: apply_router_weight_on_input = true; supported: false (routing weights scale "
        "the experts' outputs)"));
  read_dense_dtype(fields, config);
  if (!fields.status().ok()) return;
  fields.require(
      config.top_k <= config.num_experts,
      equals("num_experts_per_tok", config.top_k) + " exceeds " + equals(experts_key, config.num_experts));
  fields.require(config.num_heads % config.num_kv_heads == 0,
                 equals("num_attention_heads", config.num_heads) + " is not a multiple of " +
                     equals("num_key_value_heads", config.num_kv_heads));
}

void read_eos(JsonFields& fields, ModelConfig& config) {
  if (!fields.has("eos_token_id")) return;
  std::vector<int64_t> ids;
  fields.read_ints("eos_token_id", ids, {0, config.vocab_size - 1});
  config.eos_token_ids.assign(ids.begin(), ids.end());
}

Status read_generation_config(std::string_view text, ModelConfig& config) {
  FP4MOE_ASSIGN_OR_RETURN(const Json json, parse_json(text, "generation_config.json"));
  JsonFields fields(json, "generation_config.json");
  read_eos(fields, config);
  SamplingParams& sampling = config.default_sampling;
  bool do_sample = true;
  double temperature = sampling.temperature, top_p = sampling.top_p, repetition_penalty = 1, min_p = 0;
  int64_t top_k = 0;  // generation_config.json's 0 means all tokens
  fields.read_bool("do_sample", do_sample);
  fields.read_real("temperature", temperature, {0, 100});
  fields.read_real("top_p", top_p, {1e-9, 1});
  fields.read_int("top_k", top_k, {0, INT32_MAX});
  fields.read_real("min_p", min_p, {0, 1});
  fields.read_real("repetition_penalty", repetition_penalty, {1e-9, 2});
  sampling.temperature = do_sample ? static_cast<float>(temperature) : 0;
  sampling.top_p = static_cast<float>(top_p);
  sampling.top_k = top_k == 0 ? -1 : static_cast<int32_t>(top_k);
  sampling.min_p = static_cast<float>(min_p);
  sampling.repetition_penalty = static_cast<float>(repetition_penalty);
  return fields.status();
}

Status check_width(const QuantConfig& quant, const char* key, int64_t value) {
  if (value % quant.group_size == 0) return {};
  return invalid_argument("config.json: " + equals(key, value) + "; legal: multiples of " +
                          std::to_string(quant.group_size) + ", the block size of " + quant.declared_by);
}

// Checks that this family is published in the experts' format, and that H and I are multiples of its block
// size. The widths of other linear layers are checked when these layers turn out to be FP4.
Status check_quant(const FamilyRow& row, const ModelConfig& config) {
  const QuantConfig& quant = config.quant;
  if (quant.method == QuantMethod::kNone) return {};
  const bool is_gpt_oss = row.family == ModelFamily::kGptOss;
  if (is_gpt_oss != (quant.method == QuantMethod::kMxfp4GptOss))
    return unsupported(
        quant.declared_by + " declares " +
        (is_gpt_oss ? "a format other than mxfp4 for gpt_oss; supported: quant_method 'mxfp4'"
                    : std::string("mxfp4 for ") + row.model_type +
                          "; supported: quant_method 'modelopt', 'compressed-tensors', 'quark' or 'fp8'"));
  for (const ModuleAlgorithm& other : quant.other_modules)
    if (!is_mtp_name(config, other.pattern))
      return unsupported(quant.declared_by + " declares " + other.algorithm + " for modules '" +
                         other.pattern +
                         "'; supported: linear layers in FP4, FP8 (E4M3) and unquantised ones");
  const std::string expert =
      "model.layers." + std::to_string(config.num_layers - 1) + ".mlp.experts.0.up_proj";
  if (is_declared_fp8(quant, expert))
    return unsupported(quant.declared_by + " declares FP8 for '" + expert +
                       "'; supported: routed experts in FP4");
  FP4MOE_RETURN_IF_ERROR(check_width(quant, "hidden_size", config.hidden_size));
  return check_width(quant, row.expert_width_key, config.intermediate_size);
}

Result<std::string> read_if_there(const std::string& path) {
  if (!file_exists(path)) return std::string();
  return read_text_file(path, kMaxConfigBytes);
}

}  // namespace

Result<ModelConfig> parse_model_config(std::string_view config_json, std::string_view generation_config_json,
                                       std::string_view hf_quant_config_json) {
  FP4MOE_ASSIGN_OR_RETURN(const Json json, parse_json(config_json, "config.json"));
  JsonFields fields(json, "config.json");
  ModelConfig config;
  FP4MOE_ASSIGN_OR_RETURN(const FamilyRow* row, find_family(fields, config));
  config.family = row->family;
  read_sizes(fields, *row, config);
  read_family(fields, config);
  read_rope(fields, config);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (row->eos_token_id >= 0 && row->eos_token_id < config.vocab_size && !fields.contains("eos_token_id"))
    config.eos_token_ids = {row->eos_token_id};
  read_eos(fields, config);
  FP4MOE_RETURN_IF_ERROR(fields.status());

  Json hf_quant;
  if (!hf_quant_config_json.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(hf_quant, parse_json(hf_quant_config_json, "hf_quant_config.json"));
  }
  FP4MOE_ASSIGN_OR_RETURN(config.quant, parse_quant_config(json, hf_quant));
  FP4MOE_RETURN_IF_ERROR(check_quant(*row, config));
  if (!generation_config_json.empty())
    FP4MOE_RETURN_IF_ERROR(read_generation_config(generation_config_json, config));
  return config;
}

Result<ModelConfig> load_model_config(const std::string& folder) {
  if (folder.empty() || !file_exists(folder + "/"))
    return not_found(
        "model folder '" + folder +
        "' does not exist; legal: a folder on this machine with config.json and safetensors files");
  FP4MOE_ASSIGN_OR_RETURN(const std::string config, read_text_file(folder + "/config.json", kMaxConfigBytes));
  FP4MOE_ASSIGN_OR_RETURN(const std::string generation, read_if_there(folder + "/generation_config.json"));
  FP4MOE_ASSIGN_OR_RETURN(const std::string hf_quant, read_if_there(folder + "/hf_quant_config.json"));
  Result<ModelConfig> parsed = parse_model_config(config, generation, hf_quant);
  if (!parsed.ok()) return parsed.status().with_context(folder);
  return parsed;
}

}  // namespace fp4moe
