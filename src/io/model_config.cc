#include "io/model_config.h"

#include <algorithm>
#include <optional>
#include <string>

#include "base/check.h"
#include "formats/fp4_matrix.h"
#include "io/file.h"
#include "io/json_fields.h"
#include "io/quant_config.h"

namespace fp4moe {
namespace {

// Legal ranges. E * 2I * H * layers < 2^60, V * H < 2^43, and the KV cache of all positions
// (layers * positions * KV heads * head size * 2 * 4 bytes) <= 2^60: no product overflows 63 bits.
constexpr JsonFields::IntRange kWidths = {1, 1 << 18};  // H, I, ranks
constexpr JsonFields::IntRange kExperts = {1, 1 << 12};
constexpr JsonFields::IntRange kLayers = {1, 1 << 10};
constexpr JsonFields::IntRange kHeads = {1, 1 << 10};
constexpr JsonFields::IntRange kHeadDims = {2, 1 << 10};
constexpr JsonFields::IntRange kVocab = {1, 1 << 24};
constexpr JsonFields::IntRange kPositions = {1, 1 << 27};
constexpr double kHuge = 1e9;
constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;

struct FamilyRow {
  ModelFamily family;
  const char* model_type;
  const char* architecture;
  const char* experts_key;
  const char* expert_width_key;  // I of one expert
  double rms_norm_eps;           // the family's default
};

constexpr FamilyRow kFamilies[] = {
    {ModelFamily::kGptOss, "gpt_oss", "GptOssForCausalLM", "num_local_experts", "intermediate_size", 1e-5},
    {ModelFamily::kDeepseekV3, "deepseek_v3", "DeepseekV3ForCausalLM", "n_routed_experts",
     "moe_intermediate_size", 1e-6},
    {ModelFamily::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", "num_experts", "moe_intermediate_size",
     1e-6},
};

std::string equals(const char* key, int64_t value) {
  return std::string(key) + " = " + std::to_string(value);
}

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
  return unsupported("config.json: architecture '" + config.architecture + "' of model_type '" +
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
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
        "max_position_embeddings", row.experts_key, row.expert_width_key})
    fields.require_key(key);
  fields.read_int("vocab_size", config.vocab_size, kVocab);
  fields.read_int("hidden_size", config.hidden_size, kWidths);
  fields.read_int("num_hidden_layers", config.num_layers, kLayers);
  fields.read_int("num_attention_heads", config.num_heads, kHeads);
  config.num_kv_heads = config.num_heads;
  fields.read_int("num_key_value_heads", config.num_kv_heads, kHeads);
  fields.read_int("max_position_embeddings", config.max_position_embeddings, kPositions);
  fields.read_int(row.experts_key, config.num_experts, kExperts);
  fields.read_int("num_experts_per_tok", config.top_k, kExperts);
  fields.read_int(row.expert_width_key, config.intermediate_size, kWidths);
  config.rms_norm_eps = row.rms_norm_eps;
  fields.read_real("rms_norm_eps", config.rms_norm_eps, {1e-30, 1});
  fields.read_bool("tie_word_embeddings", config.tie_word_embeddings);
  config.attention_bias = row.family == ModelFamily::kGptOss;
  fields.read_bool("attention_bias", config.attention_bias);
  std::string activation = "silu";
  fields.read_string("hidden_act", activation);
  fields.require(activation == "silu", "hidden_act = '" + activation + "'; legal: silu");
  read_dense_dtype(fields, config);
  if (!fields.status().ok()) return;
  fields.require(config.top_k <= config.num_experts, equals("num_experts_per_tok", config.top_k) +
                                                         " exceeds " +
                                                         equals(row.experts_key, config.num_experts));
  fields.require(config.num_heads % config.num_kv_heads == 0,
                 equals("num_attention_heads", config.num_heads) + " is no multiple of " +
                     equals("num_key_value_heads", config.num_kv_heads));
}

void read_head_dim(JsonFields& fields, ModelConfig& config) {
  if (!fields.status().ok()) return;
  const bool divides = config.hidden_size % config.num_heads == 0;
  fields.require(fields.has("head_dim") || divides,
                 "head_dim is missing, and " + equals("hidden_size", config.hidden_size) +
                     " is no multiple of " + equals("num_attention_heads", config.num_heads));
  config.head_dim = config.hidden_size / config.num_heads;
  fields.read_int("head_dim", config.head_dim, kHeadDims);
  fields.require(config.head_dim % 2 == 0 && config.head_dim <= kHeadDims.max,
                 equals("head_dim", config.head_dim) + "; legal: even numbers from 2 to 1024");
}

void read_yarn(JsonFields& scaling, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  rope.type = RopeConfig::Type::kYarn;
  scaling.require_key("factor");
  scaling.read_real("factor", rope.factor, {1, kHuge});
  scaling.read_real("beta_fast", rope.beta_fast, {1e-6, kHuge});
  scaling.read_real("beta_slow", rope.beta_slow, {1e-6, kHuge});
  rope.original_max_position_embeddings = static_cast<double>(config.max_position_embeddings);
  scaling.read_real("original_max_position_embeddings", rope.original_max_position_embeddings, {1, kHuge});
  scaling.read_bool("truncate", rope.truncate);
  const auto read_optional = [&](const char* key, std::optional<double>& value) {
    double number = 0;
    scaling.read_real(key, number, {1e-6, kHuge});
    if (scaling.has(key)) value = number;
  };
  read_optional("attention_factor", rope.attention_factor);
  read_optional("mscale", rope.mscale);
  read_optional("mscale_all_dim", rope.mscale_all_dim);
  scaling.require(rope.beta_fast >= rope.beta_slow, "beta_fast is below beta_slow");
}

// rope_parameters {rope_type, rope_theta, ...}, or the older rope_theta beside rope_scaling {rope_type or
// type, ...}.
void read_rope(JsonFields& fields, ModelConfig& config) {
  const char* key = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  constexpr JsonFields::RealRange kThetas = {1, 1e12};
  fields.read_real("rope_theta", config.rope.theta, kThetas);
  const Json* object = fields.object(key);
  if (object == nullptr) return;
  JsonFields scaling(*object, fields.where() + ": " + key);
  for (const auto& [name, value] : object->items())
    if (value.is_object())
      scaling.fail(
          unsupported(scaling.where() + " differs by layer type ('" + name + "'); supported: one for all"));
  std::string type = "default";
  scaling.read_string("type", type);
  scaling.read_string("rope_type", type);
  scaling.read_real("rope_theta", config.rope.theta, kThetas);
  if (type == "yarn")
    read_yarn(scaling, config);
  else if (type != "default" && scaling.status().ok())
    scaling.fail(unsupported(scaling.where() + ": rope_type '" + type + "'; supported: default, yarn"));
  fields.fail(scaling.status());
}

void read_gpt_oss(JsonFields& fields, ModelConfig& config) {
  read_head_dim(fields, config);
  double limit = config.swiglu_limit;
  fields.read_real("swiglu_limit", limit, {1e-6, kHuge});
  config.swiglu_limit = static_cast<float>(limit);
  int64_t window = 0;
  fields.read_int("sliding_window", window, kPositions);
  std::vector<std::string> types;
  fields.read_strings("layer_types", types);
  if (!fields.status().ok()) return;
  if (types.empty())
    for (int64_t layer = 0; layer < config.num_layers; ++layer)
      types.push_back(layer % 2 == 0 ? "sliding_attention" : "full_attention");
  fields.require(static_cast<int64_t>(types.size()) == config.num_layers,
                 "layer_types has " + std::to_string(types.size()) + " entries, but " +
                     equals("num_hidden_layers", config.num_layers));
  for (const std::string& type : types) {
    const bool sliding = type == "sliding_attention";
    fields.require(sliding || type == "full_attention",
                   "layer_types holds '" + type + "'; legal: sliding_attention, full_attention");
    fields.require(!sliding || window > 0, "sliding_window is missing, but layers use sliding_attention");
    config.layer_windows.push_back(sliding ? window : 0);
  }
}

void read_deepseek_v3(JsonFields& fields, ModelConfig& config) {
  for (const char* key :
       {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"})
    fields.require_key(key);
  MlaConfig& mla = config.mla;
  fields.read_int("q_lora_rank", mla.q_lora_rank, kWidths);
  fields.read_int("kv_lora_rank", mla.kv_lora_rank, kWidths);
  fields.read_int("qk_nope_head_dim", mla.qk_nope_head_dim, kHeadDims);
  fields.read_int("qk_rope_head_dim", mla.qk_rope_head_dim, kHeadDims);
  fields.read_int("v_head_dim", mla.v_head_dim, kHeadDims);
  fields.read_bool("rope_interleave", mla.rope_interleave);
  fields.require(mla.qk_rope_head_dim % 2 == 0, equals("qk_rope_head_dim", mla.qk_rope_head_dim) + " is odd");
  config.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
  fields.read_int("n_shared_experts", config.num_shared_experts, {0, kExperts.max});
  fields.read_int("intermediate_size", config.dense_intermediate_size, kWidths);

  RouterConfig& router = config.router;
  std::string scoring = "sigmoid";
  fields.read_string("scoring_func", scoring);
  fields.require(scoring == "sigmoid", "scoring_func = '" + scoring + "'; legal: sigmoid");
  fields.read_int("n_group", router.num_groups, kExperts);
  router.top_k_groups = router.num_groups;
  fields.read_int("topk_group", router.top_k_groups, kExperts);
  router.norm_top_k = true;
  fields.read_bool("norm_topk_prob", router.norm_top_k);
  fields.read_real("routed_scaling_factor", router.scaling_factor, {1e-6, kHuge});
  if (!fields.status().ok()) return;
  fields.require(config.num_experts % router.num_groups == 0, equals("n_routed_experts", config.num_experts) +
                                                                  " is no multiple of " +
                                                                  equals("n_group", router.num_groups));
  fields.require(
      router.top_k_groups <= router.num_groups,
      equals("topk_group", router.top_k_groups) + " exceeds " + equals("n_group", router.num_groups));
  const int64_t choosable = config.num_experts / router.num_groups * router.top_k_groups;
  fields.require(config.top_k <= choosable, equals("num_experts_per_tok", config.top_k) + " exceeds the " +
                                                std::to_string(choosable) + " experts of topk_group groups");
  int64_t first_with_experts = 0;
  fields.read_int("first_k_dense_replace", first_with_experts, {0, config.num_layers});
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    config.layer_has_experts.push_back(layer >= first_with_experts);
  config.layer_windows.assign(static_cast<size_t>(config.num_layers), 0);
}

void read_qwen3_moe(JsonFields& fields, ModelConfig& config) {
  read_head_dim(fields, config);
  fields.read_int("intermediate_size", config.dense_intermediate_size, kWidths);
  fields.read_bool("norm_topk_prob", config.router.norm_top_k);
  bool sliding = false;
  fields.read_bool("use_sliding_window", sliding);
  if (sliding)
    fields.fail(unsupported("config.json: use_sliding_window = true; supported for qwen3_moe: false"));
  int64_t step = 1;
  std::vector<int64_t> dense_layers;
  fields.read_int("decoder_sparse_step", step, kLayers);
  fields.read_ints("mlp_only_layers", dense_layers, {0, kLayers.max});
  if (!fields.status().ok()) return;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool listed = std::find(dense_layers.begin(), dense_layers.end(), layer) != dense_layers.end();
    config.layer_has_experts.push_back(!listed && (layer + 1) % step == 0);
  }
  config.layer_windows.assign(static_cast<size_t>(config.num_layers), 0);
}

void read_family(JsonFields& fields, ModelConfig& config) {
  switch (config.family) {
    case ModelFamily::kGptOss:
      return read_gpt_oss(fields, config);
    case ModelFamily::kDeepseekV3:
      return read_deepseek_v3(fields, config);
    case ModelFamily::kQwen3Moe:
    case ModelFamily::kQwen2Moe:
      return read_qwen3_moe(fields, config);
  }
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
  double temperature = sampling.temperature, top_p = sampling.top_p;
  int64_t top_k = 0;  // 0: all tokens, in this file
  fields.read_bool("do_sample", do_sample);
  fields.read_real("temperature", temperature, {0, 100});
  fields.read_real("top_p", top_p, {1e-9, 1});
  fields.read_int("top_k", top_k, {0, INT32_MAX});
  sampling.temperature = do_sample ? static_cast<float>(temperature) : 0;
  sampling.top_p = static_cast<float>(top_p);
  sampling.top_k = top_k == 0 ? -1 : static_cast<int32_t>(top_k);
  return fields.status();
}

// The experts' format must be one that this family is published in, and cut H and I into whole blocks.
Status check_quant(const FamilyRow& row, const ModelConfig& config) {
  const QuantConfig& quant = config.quant;
  if (quant.method == QuantMethod::kNone) return {};
  const bool is_gpt_oss = row.family == ModelFamily::kGptOss;
  if (is_gpt_oss != (quant.method == QuantMethod::kMxfp4GptOss))
    return unsupported(quant.declared_by + " declares " +
                       (is_gpt_oss ? "modelopt NVFP4 for gpt_oss; supported for it: quant_method 'mxfp4'"
                                   : std::string("mxfp4 for ") + row.model_type +
                                         "; supported for it: quant_method 'modelopt' with NVFP4"));
  const auto check_width = [&](const char* key, int64_t value) -> Status {
    if (value % quant.group_size == 0) return {};
    return invalid_argument("config.json: " + equals(key, value) + "; legal: multiples of " +
                            std::to_string(quant.group_size) + ", the scale block of " + quant.declared_by);
  };
  FP4MOE_RETURN_IF_ERROR(check_width("hidden_size", config.hidden_size));
  FP4MOE_RETURN_IF_ERROR(check_width(row.expert_width_key, config.intermediate_size));
  if (config.dense_intermediate_size == 0) return {};
  return check_width("intermediate_size", config.dense_intermediate_size);
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
