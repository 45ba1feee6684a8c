#include "io/config/model_config.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "io/checkpoint/mtp_layers.h"
#include "io/config/model_families.h"
#include "io/config/quant_config.h"
#include "io/config/tensor_names.h"
#include "io/file.h"
#include "io/json_fields.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;

bool contains(const std::vector<const char*>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Result<const FamilyRow*> find_family(JsonFields& fields, ModelConfig& config) {
  std::vector<std::string> architectures;
  fields.read_string("model_type", config.model_type);
  fields.read_strings("architectures", architectures);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  if (!architectures.empty()) config.architecture = architectures[0];
  std::string supported;
  for (const FamilyRow& row : model_families()) {
    const bool same_architecture =
        config.architecture.empty() || contains(row.architectures, config.architecture);
    if (config.model_type == row.model_type && same_architecture) return &row;
    supported += std::string(supported.empty() ? "" : ", ") + row.architectures[0] + " (model_type " +
                 row.model_type + ")";
  }
  return unsupported("config.json: architecture '" + config.architecture + "' with model_type '" +
                     config.model_type + "' is not supported; supported: " + supported);
}

// Returns the text model's keys: those of text_config, and the keys of the whole file that stock classes read
// for all parts of a model.
Result<Json> text_keys(const Json& whole, const FamilyRow& row) {
  JsonFields fields(whole, "config.json");
  fields.require_key("text_config");
  const Json* text = fields.object("text_config");
  FP4MOE_RETURN_IF_ERROR(fields.status());
  JsonFields text_fields(*text, "config.json: text_config");
  std::string model_type = row.text_model_types[0];
  text_fields.read_string("model_type", model_type);
  FP4MOE_RETURN_IF_ERROR(text_fields.status());
  if (!contains(row.text_model_types, model_type)) {
    std::string legal;
    for (const char* type : row.text_model_types) legal += std::string(legal.empty() ? "" : ", ") + type;
    return unsupported("config.json: text_config: model_type '" + model_type +
                       "'; supported with model_type " + row.model_type + ": " + legal);
  }
  Json keys = *text;
  keys.erase("tie_word_embeddings");  // the whole model's key has effect
  for (const char* key :
       {"tie_word_embeddings", "torch_dtype", "dtype", "eos_token_id", "quantization_config"})
    if (const auto at = whole.find(key); at != whole.end() && !at->is_null()) keys[key] = *at;
  return keys;
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
  const bool has_default = row.stock.num_kv_heads > 0 && !fields.contains("num_key_value_heads");
  config.num_kv_heads = has_default ? row.stock.num_kv_heads : config.num_heads;
  fields.read_int("num_key_value_heads", config.num_kv_heads, kHeads);
  fields.read_int("max_position_embeddings", config.max_position_embeddings, kPositions);
  fields.read_int(experts_key, config.num_experts, kExperts);
  fields.read_int("num_experts_per_tok", config.top_k, kExperts);
  fields.read_int(row.expert_width_key, config.intermediate_size, kWidths);
  config.rms_norm_eps = row.stock.rms_norm_eps;
  config.rope.theta = row.stock.rope_theta;
  config.tie_word_embeddings = row.stock.tie_word_embeddings;
  fields.read_real("rms_norm_eps", config.rms_norm_eps, {1e-30, 1});
  fields.read_bool("tie_word_embeddings", config.tie_word_embeddings);
  config.attention_bias = row.stock.attention_bias;
  fields.read_bool("attention_bias", config.attention_bias);
  config.attention_out_bias = config.attention_bias;
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
    if (!is_mtp_name(config, text_model_name(other.pattern)) && !is_vision_name(other.pattern))
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

// Reads both declarations. A refusal names the exports that the engine runs, if there are any.
Status read_quant(const FamilyRow& row, const Json& keys, std::string_view hf_quant_config_json,
                  ModelConfig& config) {
  Json hf_quant;
  if (!hf_quant_config_json.empty()) {
    FP4MOE_ASSIGN_OR_RETURN(hf_quant, parse_json(hf_quant_config_json, "hf_quant_config.json"));
  }
  Result<QuantConfig> quant = parse_quant_config(keys, hf_quant);
  if (!quant.ok() && quant.status().code() == StatusCode::kUnsupported && row.fp4_exports != nullptr)
    return unsupported(quant.status().message() + "; FP4 exports of " + row.model_type +
                       " models: " + row.fp4_exports);
  if (!quant.ok()) return quant.status();
  config.quant = std::move(*quant);
  config.quant.text_prefix = row.text_prefix;
  config.quant.mtp_layer = config.mtp_layer;
  return check_quant(row, config);
}

Result<std::string> read_if_there(const std::string& path) {
  if (!file_exists(path)) return std::string();
  FP4MOE_ASSIGN_OR_RETURN(std::string text, read_text_file(path, kMaxConfigBytes));
  if (text.empty()) return data_loss("'" + path + "' is empty; it must be a JSON object, or absent");
  return text;
}

}  // namespace

Result<ModelConfig> parse_model_config(std::string_view config_json, std::string_view generation_config_json,
                                       std::string_view hf_quant_config_json) {
  FP4MOE_ASSIGN_OR_RETURN(const Json json, parse_json(config_json, "config.json"));
  JsonFields whole(json, "config.json");
  ModelConfig config;
  FP4MOE_ASSIGN_OR_RETURN(const FamilyRow* row, find_family(whole, config));
  config.family = row->family;
  config.text_prefix = row->text_prefix;
  const bool is_nested = !row->text_model_types.empty();
  Json text;
  if (is_nested) {
    FP4MOE_ASSIGN_OR_RETURN(text, text_keys(json, *row));
  }
  const Json& keys = is_nested ? text : json;
  JsonFields fields(keys, is_nested ? "config.json: text_config" : "config.json");
  read_sizes(fields, *row, config);
  row->read(fields, row->stock, config);
  read_rope(fields, row->stock, config);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  const int32_t eos = row->stock.eos_token_id;
  if (eos >= 0 && eos < config.vocab_size && !fields.contains("eos_token_id")) config.eos_token_ids = {eos};
  read_eos(fields, config);
  FP4MOE_RETURN_IF_ERROR(fields.status());
  FP4MOE_RETURN_IF_ERROR(read_quant(*row, keys, hf_quant_config_json, config));
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
