#include "io/config/model_families.h"

#include <algorithm>

namespace fp4moe {
namespace {

constexpr int64_t kGptOssHeadDim = 64, kGptOssWindow = 128;  // gpt-oss defaults if the file lacks the key

void read_head_dim(JsonFields& fields, ModelConfig& config) {
  if (!fields.status().ok()) return;
  const bool divides = config.hidden_size % config.num_heads == 0;
  const bool is_default = config.family == ModelFamily::kGptOss && !fields.contains("head_dim");
  fields.require(fields.has("head_dim") || is_default || divides,
                 "head_dim is missing, and " + equals("hidden_size", config.hidden_size) +
                     " is not a multiple of " + equals("num_attention_heads", config.num_heads));
  config.head_dim = is_default ? kGptOssHeadDim : config.hidden_size / config.num_heads;
  fields.read_int("head_dim", config.head_dim, kHeadDims);
  fields.require(config.head_dim % 2 == 0 && config.head_dim <= kHeadDims.max,
                 equals("head_dim", config.head_dim) + "; legal: even numbers from 2 to 1024");
}

void read_gpt_oss(JsonFields& fields, ModelConfig& config) {
  read_head_dim(fields, config);
  double limit = config.swiglu_limit, alpha = config.swiglu_alpha;
  fields.read_real("swiglu_limit", limit, {1e-6, kHuge});
  fields.read_real("swiglu_alpha", alpha, {1e-6, kHuge});
  config.swiglu_limit = static_cast<float>(limit);
  config.swiglu_alpha = static_cast<float>(alpha);
  int64_t window = fields.contains("sliding_window") ? 0 : kGptOssWindow;
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
    fields.require(!sliding || window > 0, "sliding_window is null, but layers use sliding_attention");
    config.layer_windows.push_back(sliding ? window : 0);
  }
}

void read_deepseek_router(JsonFields& fields, ModelConfig& config) {
  RoutingConfig& router = config.router;
  std::string scoring = "sigmoid";
  fields.read_string("scoring_func", scoring);
  fields.require(scoring == "sigmoid", "scoring_func = '" + scoring + "'; legal: sigmoid");
  // The stock class defaults to the best 4 of 8 groups; null disables grouping.
  router.num_groups = fields.contains("n_group") ? 1 : 8;
  fields.read_int("n_group", router.num_groups, kExperts);
  router.top_k_groups = fields.contains("topk_group") ? router.num_groups : 4;
  fields.read_int("topk_group", router.top_k_groups, kExperts);
  std::string method = "noaux_tc";
  fields.read_string("topk_method", method);
  fields.require(method == "noaux_tc" || (method == "greedy" && router.num_groups == 1),
                 "topk_method = '" + method + "'; legal: noaux_tc, and greedy with n_group = 1");
  router.has_correction_bias = method == "noaux_tc";
  router.norm_top_k = true;
  fields.read_bool("norm_topk_prob", router.norm_top_k);
  router.scaling_factor = 2.5;
  fields.read_real("routed_scaling_factor", router.scaling_factor, {1e-6, kHuge});
  if (!fields.status().ok()) return;
  fields.require(config.num_experts % router.num_groups == 0, equals("n_routed_experts", config.num_experts) +
                                                                  " is not a multiple of " +
                                                                  equals("n_group", router.num_groups));
  fields.require(
      router.top_k_groups <= router.num_groups,
      equals("topk_group", router.top_k_groups) + " exceeds " + equals("n_group", router.num_groups));
  const int64_t choosable = config.num_experts / router.num_groups * router.top_k_groups;
  fields.require(config.top_k <= choosable, equals("num_experts_per_tok", config.top_k) + " exceeds the " +
                                                std::to_string(choosable) + " experts in topk_group groups");
}

void read_deepseek_v3(JsonFields& fields, ModelConfig& config) {
  for (const char* key :
       {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"})
    fields.require_key(key);
  MlaConfig& mla = config.mla;
  mla.q_lora_rank = fields.contains("q_lora_rank") ? 0 : 1536;  // null: queries are not compressed
  fields.read_int("q_lora_rank", mla.q_lora_rank, kWidths);
  fields.read_int("kv_lora_rank", mla.kv_lora_rank, kWidths);
  fields.read_int("qk_nope_head_dim", mla.qk_nope_head_dim, kHeadDims);
  fields.read_int("qk_rope_head_dim", mla.qk_rope_head_dim, kHeadDims);
  fields.read_int("v_head_dim", mla.v_head_dim, kHeadDims);
  fields.read_bool("rope_interleave", mla.rope_interleave);
  fields.require(mla.qk_rope_head_dim % 2 == 0, equals("qk_rope_head_dim", mla.qk_rope_head_dim) + " is odd");
  config.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
  config.num_shared_experts = fields.contains("n_shared_experts") ? 0 : 1;
  fields.read_int("n_shared_experts", config.num_shared_experts, {0, kExperts.max});
  config.shared_intermediate_size = config.num_shared_experts * config.intermediate_size;
  fields.read_int("num_nextn_predict_layers", config.num_mtp_layers, {0, kLayers.max});
  fields.read_int("intermediate_size", config.dense_intermediate_size, kWidths);
  read_deepseek_router(fields, config);
  if (!fields.status().ok()) return;

  int64_t first_with_experts = 3, step = 1;
  fields.read_int("first_k_dense_replace", first_with_experts, {0, config.num_layers});
  fields.read_int("moe_layer_freq", step, kLayers);
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    config.layer_has_experts.push_back(layer >= first_with_experts && layer % step == 0);
  config.layer_windows.assign(static_cast<size_t>(config.num_layers), 0);
}

// With use_sliding_window, the stock classes apply the window to all layers of qwen3_moe, and to the layers
// of qwen2_moe that layer_types selects; the default is every even layer below max_window_layers.
void read_qwen_windows(JsonFields& fields, ModelConfig& config) {
  config.layer_windows.assign(static_cast<size_t>(config.num_layers), 0);
  bool sliding = false;
  int64_t window = fields.contains("sliding_window") ? 0 : 4096, num_alternating = 28;  // null: no window
  std::vector<std::string> types;
  fields.read_bool("use_sliding_window", sliding);
  if (!sliding) return;
  fields.read_int("sliding_window", window, kPositions);
  fields.read_int("max_window_layers", num_alternating, {0, kLayers.max});
  fields.read_strings("layer_types", types);
  const bool has_types = !types.empty() && config.family == ModelFamily::kQwen2Moe;
  fields.require(!has_types || static_cast<int64_t>(types.size()) == config.num_layers,
                 "layer_types has " + std::to_string(types.size()) + " entries, but " +
                     equals("num_hidden_layers", config.num_layers));
  if (!fields.status().ok()) return;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const size_t at = static_cast<size_t>(layer);
    bool slides = config.family == ModelFamily::kQwen3Moe || (layer % 2 == 0 && layer < num_alternating);
    if (has_types) slides = types[at] == "sliding_attention";
    if (slides) config.layer_windows[at] = window;
  }
}

// Applies Qwen's rule for which layers have experts.
void read_sparse_layers(JsonFields& fields, ModelConfig& config) {
  int64_t step = 1;
  std::vector<int64_t> dense_layers;
  fields.read_int("decoder_sparse_step", step, kLayers);
  fields.read_ints("mlp_only_layers", dense_layers, {0, kLayers.max});
  if (!fields.status().ok()) return;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool listed = std::find(dense_layers.begin(), dense_layers.end(), layer) != dense_layers.end();
    config.layer_has_experts.push_back(!listed && (layer + 1) % step == 0);
  }
}

void read_qwen(JsonFields& fields, ModelConfig& config) {
  read_head_dim(fields, config);
  config.dense_intermediate_size = config.family == ModelFamily::kQwen3Moe ? 6144 : 5632;
  fields.read_int("intermediate_size", config.dense_intermediate_size, kWidths);
  fields.read_bool("norm_topk_prob", config.router.norm_top_k);
  read_sparse_layers(fields, config);
  read_qwen_windows(fields, config);
  config.qk_norm = config.family == ModelFamily::kQwen3Moe;
  if (config.family == ModelFamily::kQwen3Moe) return;
  config.attention_bias = true;
  fields.read_bool("qkv_bias", config.attention_bias);
  config.num_shared_experts = 1;
  config.shared_expert_gate = true;
  fields.require_key("shared_expert_intermediate_size");
  fields.read_int("shared_expert_intermediate_size", config.shared_intermediate_size, kWidths);
}

}  // namespace

std::string equals(const char* key, int64_t value) {
  return std::string(key) + " = " + std::to_string(value);
}

void read_family(JsonFields& fields, ModelConfig& config) {
  switch (config.family) {
    case ModelFamily::kGptOss:
      return read_gpt_oss(fields, config);
    case ModelFamily::kDeepseekV3:
      return read_deepseek_v3(fields, config);
    case ModelFamily::kQwen3Moe:
    case ModelFamily::kQwen2Moe:
      return read_qwen(fields, config);
  }
}

}  // namespace fp4moe
