#include "io/config/eagle3_config.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "io/config/model_families.h"
#include "io/file.h"
#include "io/json_fields.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxHeadConfigBytes = int64_t{64} << 20;
constexpr const char* kLayerIds = "eagle_aux_hidden_state_layer_ids";

// The objects of config.json: the whole file, the keys of the layers (in speculators' format a separate
// object) and eagle_config (possibly empty).
struct HeadFields {
  JsonFields top, layers, eagle;
  bool is_speculators = false;

  Status status() const {
    for (const JsonFields* fields : {&top, &layers, &eagle})
      if (!fields->status().ok()) return fields->status();
    return {};
  }
};

// A switch of the head that the engine has with one value only.
struct FixedSwitch {
  const char* key;
  Json value;
};

const std::vector<FixedSwitch>& fixed_switches() {
  static const std::vector<FixedSwitch> switches = {{"use_input_layernorm_in_first_layer", true},
                                                    {"use_last_layernorm", true},
                                                    {"use_mtp_layernorm", false},
                                                    {"next_layer_regular", true},
                                                    {"parallel_draft_step", 1}};
  return switches;
}

bool is_default_value(const Json& value) {
  return value.is_null() || value == false || value == 0 || value == "" ||
         (value.is_structured() && value.empty());
}

Status unsupported_value(const JsonFields& fields, const std::string& key, const Json& value,
                         const std::string& supported) {
  return unsupported(fields.where() + ": " + key + " = " + json_brief(value) + "; supported: " + supported);
}

// Refuses keys of `object` with a value that the engine does not have; with `is_closed`, also unknown keys.
void check_head_keys(const Json& object, JsonFields& fields, bool is_closed) {
  constexpr std::string_view kKnown[] = {
      kLayerIds, "use_aux_hidden_state", "num_aux_hidden_states", "norm_before_fc",
      "fc_norm", "use_aux_norm",         "norm_output",           "norm_before_residual"};
  if (!object.is_object()) return;
  for (const auto& [key, value] : object.items()) {
    const auto fixed = std::ranges::find(fixed_switches(), key, &FixedSwitch::key);
    if (fixed != fixed_switches().end()) {
      if (!value.is_null() && value != fixed->value)
        fields.fail(unsupported_value(fields, key, value, fixed->value.dump()));
    } else if (is_closed && std::ranges::find(kKnown, key) == std::end(kKnown) && !is_default_value(value)) {
      fields.fail(unsupported_value(fields, key, value, "a head without this key"));
    }
  }
}

void read_kind(HeadFields& head, ModelConfig& layers) {
  constexpr std::string_view kArchitectures[] = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
                                                 "Eagle3Speculator", "Eagle3DraftModel"};
  std::vector<std::string> architectures;
  head.top.read_strings("architectures", architectures);
  const std::string name = architectures.empty() ? "" : architectures[0];
  layers.architecture = name;
  if (std::ranges::find(kArchitectures, name) == std::end(kArchitectures))
    head.top.fail(unsupported("config.json: architecture '" + name +
                              "' is not an EAGLE-3 head; supported: LlamaForCausalLMEagle3, "
                              "Eagle3LlamaForCausalLM, Eagle3Speculator, Eagle3DraftModel"));
  std::string algorithm = "eagle3", model_type = "llama";
  head.top.read_string("speculators_model_type", algorithm);
  if (algorithm != "eagle3")
    head.top.fail(unsupported_value(head.top, "speculators_model_type", algorithm, "eagle3"));
  head.layers.read_string("model_type", model_type);
  if (model_type != "llama" && model_type != "gpt_oss")
    head.layers.fail(unsupported_value(head.layers, "model_type", model_type, "llama, gpt_oss"));
}

// Refuses what a layer of a head may not have.
void check_plain_layers(JsonFields& fields) {
  for (const char* key :
       {"attention_bias", "mlp_bias", "bias", "tie_word_embeddings", "use_sliding_window"}) {
    bool value = false;
    fields.read_bool(key, value);
    if (value) fields.fail(unsupported_value(fields, key, value, "false"));
  }
  std::string activation = "silu";
  fields.read_string("hidden_act", activation);
  if (activation != "silu") fields.fail(unsupported_value(fields, "hidden_act", activation, "silu"));
  std::vector<std::string> types;
  fields.read_strings("layer_types", types);
  for (const std::string& type : types)
    if (type != "full_attention")
      fields.fail(unsupported_value(fields, "layer_types", Json(type), "full_attention"));
  if (fields.has("quantization_config"))
    fields.fail(unsupported(fields.where() + ": quantization_config; supported: heads in bf16"));
}

void read_layer_sizes(JsonFields& fields, ModelConfig& layers) {
  for (const char* key : {"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"})
    fields.require_key(key);
  layers.num_layers = 1;
  fields.read_int("num_hidden_layers", layers.num_layers, kLayers);
  fields.read_int("hidden_size", layers.hidden_size, kWidths);
  fields.read_int("intermediate_size", layers.dense_intermediate_size, kWidths);
  fields.read_int("num_attention_heads", layers.num_heads, kHeads);
  layers.num_kv_heads = layers.num_heads;
  fields.read_int("num_key_value_heads", layers.num_kv_heads, kHeads);
  fields.read_int("vocab_size", layers.vocab_size, kVocab);
  layers.max_position_embeddings = 2048;  // YaRN's original context if the file has neither
  fields.read_int("max_position_embeddings", layers.max_position_embeddings, kPositions);
  layers.rms_norm_eps = 1e-6;
  fields.read_real("rms_norm_eps", layers.rms_norm_eps, {1e-30, 1});
  read_head_dim(fields, /*stock_head_dim=*/0, layers);
  if (!fields.status().ok()) return;
  fields.require(layers.num_heads % layers.num_kv_heads == 0,
                 equals("num_attention_heads", layers.num_heads) + " is not a multiple of " +
                     equals("num_key_value_heads", layers.num_kv_heads));
  layers.layer_windows.assign(static_cast<size_t>(layers.num_layers), 0);
  layers.layer_has_experts.assign(static_cast<size_t>(layers.num_layers), false);
  read_rope(fields, {}, layers);
}

// Reads a switch that has several names and is at the top level or in eagle_config.
void read_switch(HeadFields& head, std::initializer_list<const char*> names, bool& value) {
  std::optional<bool> first;
  for (JsonFields* fields : {&head.top, &head.eagle})
    for (const char* name : names) {
      if (!fields->has(name)) continue;
      fields->read_bool(name, value);
      fields->require(first.value_or(value) == value,
                      std::string(name) + " contradicts another key of the same meaning");
      first = value;
    }
}

void read_norms(HeadFields& head, Eagle3Config& config) {
  if (head.is_speculators) head.top.require_key("norm_before_residual");  // its readers differ in the default
  read_switch(head, {"norm_before_fc"}, config.norm_before_fc);
  read_switch(head, {"fc_norm", "use_aux_norm"}, config.fc_norm);
  read_switch(head, {"norm_before_residual"}, config.norm_before_residual);
  read_switch(head, {"norm_output"}, config.norm_output);
  if (config.norm_before_fc && config.fc_norm)
    head.top.fail(
        unsupported(head.top.where() + ": norm_before_fc = true and fc_norm = true; supported: one of them"));
}

// Turns the numbers of layers into numbers of the layers before the features. SpecForge's and ModelOpt's
// lists are such numbers, unless the largest is the number of layers: then, as always in speculators' format,
// they are numbers of the layers after the features.
std::vector<int64_t> layers_before(std::vector<int64_t> ids, bool is_speculators, int64_t num_layers) {
  if (!is_speculators && std::ranges::max(ids) < num_layers) return ids;
  for (int64_t& id : ids) --id;
  return ids;
}

void read_features(HeadFields& head, int64_t num_layers, Eagle3Config& config) {
  std::vector<int64_t> ids;
  head.eagle.read_ints(kLayerIds, ids, {0, num_layers});
  head.top.require(ids.empty() || !head.top.has(kLayerIds),
                   std::string(kLayerIds) + " is at the top level and also in eagle_config");
  const bool is_top = head.top.has(kLayerIds);
  head.top.read_ints(kLayerIds, ids, {1, num_layers});
  bool uses_residuals = true;
  head.eagle.read_bool("use_aux_hidden_state", uses_residuals);
  if (!head.status().ok()) return;
  if (!uses_residuals) {
    head.eagle.require(ids.empty(), std::string(kLayerIds) + " = " + json_brief(ids) +
                                        " with use_aux_hidden_state = false; legal: an empty list");
    if (config.norm_before_fc || config.fc_norm)
      head.eagle.fail(
          unsupported(head.eagle.where() + ": use_aux_hidden_state = false with norm_before_fc or fc_norm"));
    return;
  }
  if (ids.empty()) {
    ids = {1, num_layers / 2 - 1, num_layers - 4};
    head.top.require(ids[0] < ids[1] && ids[1] < ids[2],
                     std::string(kLayerIds) + " is missing, and " + equals("num_hidden_layers", num_layers) +
                         " of the target; legal: defaults exist for targets of 7 and more layers");
  } else {
    ids = layers_before(std::move(ids), is_top, num_layers);
  }
  for (size_t i = 0; i < ids.size(); ++i)
    head.top.require(ids[i] >= 0 && (i == 0 || ids[i - 1] < ids[i]),
                     std::string(kLayerIds) + ": layers " + json_brief(ids) +
                         " (counted from 0); legal: ascending numbers from 0 to " +
                         std::to_string(num_layers - 1));
  config.after_layers = std::move(ids);
}

void check_num_features(HeadFields& head, const Eagle3Config& config) {
  int64_t declared = config.num_features();
  for (JsonFields* fields : {&head.top, &head.eagle}) {
    fields->read_int("num_aux_hidden_states", declared, kLayers);
    if (!config.after_layers.empty())
      fields->require(declared == config.num_features(),
                      equals("num_aux_hidden_states", declared) + ", but the features are those of " +
                          std::to_string(config.num_features()) + " layers");
  }
}

// Sets the sizes that the head and its target have in common.
void check_target(HeadFields& head, const ModelConfig& target, Eagle3Config& config) {
  config.target_hidden_size = config.layers.hidden_size;
  head.top.read_int("target_hidden_size", config.target_hidden_size, kWidths);
  config.target_vocab_size = config.layers.vocab_size;
  head.top.read_int("draft_vocab_size", config.layers.vocab_size, kVocab);
  if (!head.status().ok()) return;
  const auto must_equal = [&](const char* key, int64_t value, const char* target_key, int64_t target_value) {
    if (value != target_value)
      head.top.fail(unsupported("config.json: " + equals(key, value) + ", but the target has " +
                                equals(target_key, target_value) + "; the head is for another model"));
  };
  const char* hidden_key = head.top.has("target_hidden_size") ? "target_hidden_size" : "hidden_size";
  must_equal(hidden_key, config.target_hidden_size, "hidden_size", target.hidden_size);
  must_equal("vocab_size", config.target_vocab_size, "vocab_size", target.vocab_size);
  head.top.require(config.layers.vocab_size <= config.target_vocab_size,
                   equals("draft_vocab_size", config.layers.vocab_size) + " exceeds " +
                       equals("vocab_size", config.target_vocab_size));
  config.layers.max_position_embeddings = target.max_position_embeddings;
}

Status check_target_family(const ModelConfig& target) {
  if (target.mla.kv_lora_rank == 0) return {};
  return unsupported("EAGLE-3 head for a target of model_type " + target.model_type +
                     ", which has latent attention; supported: targets with grouped-query attention "
                     "(gpt_oss, qwen2_moe, qwen3_moe, qwen3_vl_moe, glm4_moe)");
}

}  // namespace

Result<Eagle3Config> parse_eagle3_config(std::string_view config_json, const ModelConfig& target) {
  FP4MOE_RETURN_IF_ERROR(check_target_family(target));
  FP4MOE_ASSIGN_OR_RETURN(const Json json, parse_json(config_json, "config.json"));
  JsonFields top(json, "config.json");
  const Json empty = Json::object();
  const Json *layers = top.object("transformer_layer_config"), *eagle = top.object("eagle_config");
  FP4MOE_RETURN_IF_ERROR(top.status());
  const bool is_speculators = layers != nullptr;
  HeadFields head = {std::move(top),
                     JsonFields(is_speculators ? *layers : json,
                                is_speculators ? "config.json: transformer_layer_config" : "config.json"),
                     JsonFields(eagle == nullptr ? empty : *eagle, "config.json: eagle_config"),
                     is_speculators};
  Eagle3Config config;
  config.layers.family = ModelFamily::kEagle3Head;
  config.layers.model_type = "eagle3";
  read_kind(head, config.layers);
  check_head_keys(json, head.top, /*is_closed=*/false);
  if (eagle != nullptr) check_head_keys(*eagle, head.eagle, /*is_closed=*/true);
  check_plain_layers(head.layers);
  FP4MOE_RETURN_IF_ERROR(head.status());
  read_layer_sizes(head.layers, config.layers);
  FP4MOE_RETURN_IF_ERROR(head.status());
  check_target(head, target, config);
  read_norms(head, config);
  FP4MOE_RETURN_IF_ERROR(head.status());
  read_features(head, target.num_layers, config);
  check_num_features(head, config);
  FP4MOE_RETURN_IF_ERROR(head.status());
  return config;
}

Result<Eagle3Config> load_eagle3_config(const std::string& folder, const ModelConfig& target) {
  const std::string path = folder + "/config.json";
  if (folder.empty() || !file_exists(path))
    return not_found("draft model folder '" + folder +
                     "' has no config.json; legal: a folder with config.json and safetensors files");
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxHeadConfigBytes));
  Result<Eagle3Config> config = parse_eagle3_config(text, target);
  if (!config.ok()) return config.status().with_context(folder);
  return config;
}

}  // namespace fp4moe
