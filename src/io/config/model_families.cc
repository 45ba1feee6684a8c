#include "io/config/model_families.h"

#include <algorithm>

namespace fp4moe {
namespace {

constexpr int64_t kGptOssWindow = 128;  // the default if the file lacks the key

void require_type_per_layer(JsonFields& fields, const char* key, const std::vector<std::string>& types,
                            const ModelConfig& config) {
  fields.require(std::ssize(types) == config.num_layers, std::string(key) + " has " +
                                                             std::to_string(types.size()) + " entries, but " +
                                                             equals("num_hidden_layers", config.num_layers));
}

void read_gpt_oss(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  read_head_dim(fields, stock.head_dim, config);
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
  require_type_per_layer(fields, "layer_types", types, config);
  for (const std::string& type : types) {
    const bool sliding = type == "sliding_attention";
    fields.require(sliding || type == "full_attention",
                   "layer_types holds '" + type + "'; legal: sliding_attention, full_attention");
    fields.require(!sliding || window > 0, "sliding_window is null, but layers use sliding_attention");
    config.layer_windows.push_back(sliding ? window : 0);
  }
}

void read_deepseek_router(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  RoutingConfig& router = config.router;
  std::string scoring = "sigmoid";
  fields.read_string("scoring_func", scoring);
  fields.require(scoring == "sigmoid", "scoring_func = '" + scoring + "'; legal: sigmoid");
  router.num_groups = fields.contains("n_group") ? 1 : stock.num_groups;  // null disables grouping
  fields.read_int("n_group", router.num_groups, kExperts);
  router.top_k_groups = fields.contains("topk_group") ? router.num_groups : stock.top_k_groups;
  fields.read_int("topk_group", router.top_k_groups, kExperts);
  std::string method = "noaux_tc";
  fields.read_string("topk_method", method);
  fields.require(method == "noaux_tc" || (method == "greedy" && router.num_groups == 1),
                 "topk_method = '" + method + "'; legal: noaux_tc, and greedy with n_group = 1");
  router.has_correction_bias = method == "noaux_tc";
  router.norm_top_k = true;
  fields.read_bool("norm_topk_prob", router.norm_top_k);
  router.scaling_factor = stock.routed_scaling_factor;
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

// Applies mlp_layer_types (dense or sparse, per layer) or, without it, first_k_dense_replace and
// moe_layer_freq.
void read_deepseek_layers(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  int64_t num_dense = stock.num_dense_layers, step = 1;
  std::vector<std::string> types;
  fields.read_int("first_k_dense_replace", num_dense, {0, config.num_layers});
  fields.read_int("moe_layer_freq", step, kLayers);
  fields.read_strings("mlp_layer_types", types);
  if (!types.empty()) require_type_per_layer(fields, "mlp_layer_types", types, config);
  if (!fields.status().ok()) return;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    bool is_sparse = layer >= num_dense && layer % step == 0;
    if (!types.empty()) {
      const std::string& type = types[static_cast<size_t>(layer)];
      fields.require(type == "sparse" || type == "dense",
                     "mlp_layer_types holds '" + type + "'; legal: dense, sparse");
      fields.require(!fields.has("first_k_dense_replace") || is_sparse == (type == "sparse"),
                     "mlp_layer_types says that layer " + std::to_string(layer) + " is " + type +
                         ", which contradicts " + equals("first_k_dense_replace", num_dense));
      is_sparse = type == "sparse";
    }
    config.layer_has_experts.push_back(is_sparse);
  }
  config.layer_windows.assign(static_cast<size_t>(config.num_layers), 0);
}

// Reads the keys of DeepSeek's feed-forward: router, shared experts, and which layers have experts.
void read_deepseek_moe(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  config.num_shared_experts = fields.contains("n_shared_experts") ? 0 : 1;
  fields.read_int("n_shared_experts", config.num_shared_experts, {0, kExperts.max});
  config.shared_intermediate_size = config.num_shared_experts * config.intermediate_size;
  fields.read_int("num_nextn_predict_layers", config.num_mtp_layers, {0, kLayers.max});
  config.dense_intermediate_size = stock.dense_intermediate_size;
  if (stock.dense_intermediate_size == 0) fields.require_key("intermediate_size");
  fields.read_int("intermediate_size", config.dense_intermediate_size, kWidths);
  read_deepseek_router(fields, stock, config);
  if (fields.status().ok()) read_deepseek_layers(fields, stock, config);
}

void read_deepseek_v3(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
    fields.require_key(key);
  MlaConfig& mla = config.mla;
  mla.q_lora_rank = fields.contains("q_lora_rank") ? 0 : stock.q_lora_rank;  // null: not compressed
  fields.read_int("q_lora_rank", mla.q_lora_rank, kWidths);
  fields.read_int("kv_lora_rank", mla.kv_lora_rank, kWidths);
  fields.read_int("qk_nope_head_dim", mla.qk_nope_head_dim, kHeadDims);
  fields.read_int("qk_rope_head_dim", mla.qk_rope_head_dim, kHeadDims);
  fields.read_int("v_head_dim", mla.v_head_dim, kHeadDims);
  fields.read_bool("rope_interleave", mla.rope_interleave);
  fields.require(mla.qk_rope_head_dim % 2 == 0, equals("qk_rope_head_dim", mla.qk_rope_head_dim) + " is odd");
  config.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
  read_deepseek_moe(fields, stock, config);
}

void read_glm4_moe(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  read_head_dim(fields, stock.head_dim, config);
  fields.read_bool("use_qk_norm", config.qk_norm);
  config.attention_out_bias = false;
  read_deepseek_moe(fields, stock, config);
}

// With use_sliding_window, the stock classes apply the window to all layers of qwen3_moe, and to the layers
// of qwen2_moe that layer_types selects; the default is every even layer below max_window_layers.
void read_qwen_windows(JsonFields& fields, bool on_all_layers, ModelConfig& config) {
  bool sliding = false;
  int64_t window = fields.contains("sliding_window") ? 0 : 4096, num_alternating = 28;  // null: no window
  std::vector<std::string> types;
  fields.read_bool("use_sliding_window", sliding);
  if (!sliding) return;
  fields.read_int("sliding_window", window, kPositions);
  fields.read_int("max_window_layers", num_alternating, {0, kLayers.max});
  fields.read_strings("layer_types", types);
  const bool has_types = !types.empty() && !on_all_layers;
  if (has_types) require_type_per_layer(fields, "layer_types", types, config);
  if (!fields.status().ok()) return;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const size_t at = static_cast<size_t>(layer);
    bool slides = on_all_layers || (layer % 2 == 0 && layer < num_alternating);
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

// Reads the keys common to all Qwen families.
void read_qwen(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  read_head_dim(fields, stock.head_dim, config);
  config.dense_intermediate_size = stock.dense_intermediate_size;
  fields.read_int("intermediate_size", config.dense_intermediate_size, kWidths);
  fields.read_bool("norm_topk_prob", config.router.norm_top_k);
  read_sparse_layers(fields, config);
  config.layer_windows.assign(static_cast<size_t>(config.num_layers), 0);
}

void read_qwen3(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  read_qwen(fields, stock, config);
  read_qwen_windows(fields, /*on_all_layers=*/true, config);
  config.qk_norm = true;
}

// The stock class has no windows and always divides the chosen experts' weights by their sum. In a text, the
// three positions of a token (time, height, width) are equal, so mRoPE is plain RoPE.
void read_qwen3_vl(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  config.router.norm_top_k = true;
  read_qwen(fields, stock, config);
  fields.require(config.router.norm_top_k, "norm_topk_prob = false; legal: true");
  config.qk_norm = true;
}

void read_gated_shared_expert(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  config.num_shared_experts = 1;
  config.shared_expert_gate = true;
  config.shared_intermediate_size = stock.shared_intermediate_size;
  if (stock.shared_intermediate_size == 0) fields.require_key("shared_expert_intermediate_size");
  fields.read_int("shared_expert_intermediate_size", config.shared_intermediate_size, kWidths);
}

void read_qwen2(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  read_qwen(fields, stock, config);
  read_qwen_windows(fields, /*on_all_layers=*/false, config);
  config.attention_bias = true;
  fields.read_bool("qkv_bias", config.attention_bias);
  config.attention_out_bias = false;
  read_gated_shared_expert(fields, stock, config);
}

// Reads which layers keep a state: layer_types or, without it, all but every full_attention_interval-th.
void read_state_layers(JsonFields& fields, ModelConfig& config) {
  int64_t interval = 4;
  std::vector<std::string> types;
  fields.read_int("full_attention_interval", interval, kLayers);
  fields.read_strings("layer_types", types);
  if (!fields.status().ok()) return;
  if (types.empty())
    for (int64_t layer = 0; layer < config.num_layers; ++layer)
      types.push_back((layer + 1) % interval == 0 ? "full_attention" : "linear_attention");
  require_type_per_layer(fields, "layer_types", types, config);
  for (const std::string& type : types) {
    const bool has_state = type == "linear_attention";
    fields.require(has_state || type == "full_attention",
                   "layer_types holds '" + type + "'; legal: linear_attention, full_attention");
    config.layer_has_state.push_back(has_state);
  }
  fields.require(std::find(types.begin(), types.end(), "full_attention") != types.end(),
                 "no layer of " + std::to_string(config.num_layers) +
                     " has full attention; legal: at least one (layer_types, full_attention_interval)");
}

// Reads a key whose other values change the layers in ways that the engine does not run.
void require_only(JsonFields& fields, const char* key, std::initializer_list<const char*> supported) {
  std::string value = *supported.begin(), names;
  fields.read_string(key, value);
  bool is_supported = false;
  for (const char* name : supported) {
    is_supported = is_supported || value == name;
    names += std::string(names.empty() ? "" : ", ") + name;
  }
  if (!is_supported && fields.status().ok())
    fields.fail(unsupported(fields.where() + ": " + key + " = '" + value + "'; supported: " + names));
}

// Reads the sizes of the layers with a gated delta net.
void read_delta(JsonFields& fields, ModelConfig& config) {
  DeltaConfig& delta = config.delta;
  delta = {.num_key_heads = 16,
           .num_value_heads = 32,
           .key_head_dim = 128,
           .value_head_dim = 128,
           .conv_width = 4,
           .has_grouped_inputs = delta.has_grouped_inputs};
  fields.read_int("linear_num_key_heads", delta.num_key_heads, kHeads);
  fields.read_int("linear_num_value_heads", delta.num_value_heads, kHeads);
  fields.read_int("linear_key_head_dim", delta.key_head_dim, kDeltaHeadDims);
  fields.read_int("linear_value_head_dim", delta.value_head_dim, kDeltaHeadDims);
  fields.read_int("linear_conv_kernel_dim", delta.conv_width, kConvWidths);
  require_only(fields, "output_gate_type", {"swish", "silu"});
  require_only(fields, "mamba_ssm_dtype", {"float32"});
  if (!fields.status().ok()) return;
  fields.require(delta.num_value_heads % delta.num_key_heads == 0,
                 equals("linear_num_value_heads", delta.num_value_heads) + " is not a multiple of " +
                     equals("linear_num_key_heads", delta.num_key_heads));
}

// Not every config.json of a checkpoint with an MTP layer declares it.
void read_layer_below_mtp(JsonFields& fields, ModelConfig& config) {
  bool has_embedding = false;
  config.mtp_layer = config.num_layers;
  config.may_have_mtp_layer = !fields.contains("mtp_num_hidden_layers");
  fields.read_int("mtp_num_hidden_layers", config.num_mtp_layers, {0, kLayers.max});
  fields.read_bool("mtp_use_dedicated_embeddings", has_embedding);
  if (has_embedding)
    fields.fail(unsupported(fields.where() + ": mtp_use_dedicated_embeddings = true; supported: false"));
}

// Layers with a gated delta net between layers with gated attention; the shared expert always has a gate.
void read_gated_layers(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  config.centered_norms = config.attention_gate = true;
  fields.read_bool("attn_output_gate", config.attention_gate);
  if (!config.attention_gate)
    fields.fail(unsupported(fields.where() + ": attn_output_gate = false; supported: true"));
  read_gated_shared_expert(fields, stock, config);
  read_delta(fields, config);
  read_state_layers(fields, config);
  read_layer_below_mtp(fields, config);
}

void read_qwen3_5(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  read_qwen3_vl(fields, stock, config);
  read_gated_layers(fields, stock, config);
}

void read_qwen3_next(JsonFields& fields, const StockDefaults& stock, ModelConfig& config) {
  config.router.norm_top_k = config.qk_norm = config.delta.has_grouped_inputs = true;
  read_qwen(fields, stock, config);
  read_gated_layers(fields, stock, config);
}

// ---- the table

constexpr StockDefaults kDeepseekV3 = {.eos_token_id = 1,
                                       .q_lora_rank = 1536,
                                       .num_groups = 8,
                                       .top_k_groups = 4,
                                       .num_dense_layers = 3,
                                       .routed_scaling_factor = 2.5};
// A row with DeepSeek's key names.
FamilyRow deepseek_like(const char* model_type, std::vector<const char*> architectures,
                        const StockDefaults& stock) {
  return {.family = ModelFamily::kDeepseekV3,
          .model_type = model_type,
          .architectures = std::move(architectures),
          .experts_key = "n_routed_experts",
          .expert_width_key = "moe_intermediate_size",
          .read = read_deepseek_v3,
          .stock = stock};
}

FamilyRow kimi(FamilyRow row) {
  row.fp4_exports = "nvidia/Kimi-K2-Thinking-NVFP4, nvidia/Kimi-K2.5-NVFP4, nvidia/Kimi-K2.6-NVFP4";
  return row;
}

FamilyRow kimi_k25() {
  StockDefaults stock = kDeepseekV3;
  stock.tie_word_embeddings = true;
  FamilyRow row = deepseek_like(
      "kimi_k25", {"KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"}, stock);
  row.text_model_types = {"kimi_k2", "deepseek_v3"};
  row.text_prefix = "language_model.";
  return kimi(std::move(row));
}

FamilyRow glm4_moe() {
  FamilyRow row = deepseek_like("glm4_moe", {"Glm4MoeForCausalLM"},
                                {.rms_norm_eps = 1e-5,
                                 .num_kv_heads = 8,
                                 .partial_rotary_factor = 0.5,
                                 .dense_intermediate_size = 10944});
  row.family = ModelFamily::kGlm4Moe;
  row.read = read_glm4_moe;
  return row;
}

// A row with Qwen's key names.
FamilyRow qwen_like(const char* model_type, const char* architecture, const StockDefaults& stock) {
  return {.family = ModelFamily::kQwen3Moe,
          .model_type = model_type,
          .architectures = {architecture},
          .experts_key = "num_experts",
          .expert_width_key = "moe_intermediate_size",
          .read = read_qwen3,
          .stock = stock};
}

FamilyRow qwen2_moe() {
  FamilyRow row =
      qwen_like("qwen2_moe", "Qwen2MoeForCausalLM", {.num_kv_heads = 16, .dense_intermediate_size = 5632});
  row.family = ModelFamily::kQwen2Moe;
  row.read = read_qwen2;
  return row;
}

FamilyRow qwen3_vl_moe() {
  FamilyRow row = qwen_like("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
                            {.num_kv_heads = 16, .rope_theta = 500000, .dense_intermediate_size = 5632});
  row.read = read_qwen3_vl;
  row.text_model_types = {"qwen3_vl_moe_text"};
  row.text_prefix = "model.language_model.";
  return row;
}

// Rows of Qwen's families with gated delta nets.
FamilyRow qwen3_5_moe_text() {
  FamilyRow row = qwen_like(
      "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
      {.num_kv_heads = 2, .head_dim = 256, .partial_rotary_factor = 0.25, .shared_intermediate_size = 512});
  row.family = ModelFamily::kQwen3Next;
  row.read = read_qwen3_5;
  return row;
}

FamilyRow qwen3_5_moe() {
  FamilyRow row = qwen3_5_moe_text();
  row.model_type = "qwen3_5_moe";
  row.architectures = {"Qwen3_5MoeForConditionalGeneration"};
  row.text_model_types = {"qwen3_5_moe_text"};
  row.text_prefix = "model.language_model.";
  return row;
}

FamilyRow qwen3_next() {
  FamilyRow row = qwen3_5_moe_text();
  row.model_type = "qwen3_next";
  row.architectures = {"Qwen3NextForCausalLM"};
  row.read = read_qwen3_next;
  row.stock.dense_intermediate_size = 5632;
  return row;
}

std::vector<FamilyRow> make_families() {
  return {{.family = ModelFamily::kGptOss,
           .model_type = "gpt_oss",
           .architectures = {"GptOssForCausalLM"},
           .experts_key = "num_local_experts",
           .expert_width_key = "intermediate_size",
           .read = read_gpt_oss,
           .stock = {.rms_norm_eps = 1e-5,
                     .num_kv_heads = 8,
                     .head_dim = 64,
                     .rope_theta = 150000,
                     .attention_bias = true}},
          deepseek_like("deepseek_v3", {"DeepseekV3ForCausalLM"}, kDeepseekV3),
          kimi(deepseek_like("kimi_k2", {"DeepseekV3ForCausalLM", "KimiK2ForCausalLM"}, kDeepseekV3)),
          kimi_k25(),
          glm4_moe(),
          deepseek_like("glm4_moe_lite", {"Glm4MoeLiteForCausalLM"},
                        {.rms_norm_eps = 1e-5,
                         .eos_token_id = 1,
                         .dense_intermediate_size = 10240,
                         .q_lora_rank = 768,
                         .routed_scaling_factor = 1.8}),
          qwen2_moe(),
          qwen_like("qwen3_moe", "Qwen3MoeForCausalLM", {.num_kv_heads = 4, .dense_intermediate_size = 6144}),
          qwen3_vl_moe(),
          qwen3_next(),
          qwen3_5_moe(),
          qwen3_5_moe_text()};
}

}  // namespace

void read_head_dim(JsonFields& fields, int64_t stock_head_dim, ModelConfig& config) {
  if (!fields.status().ok()) return;
  const bool divides = config.hidden_size % config.num_heads == 0;
  const bool is_default = stock_head_dim > 0 && !fields.contains("head_dim");
  fields.require(fields.has("head_dim") || is_default || divides,
                 "head_dim is missing, and " + equals("hidden_size", config.hidden_size) +
                     " is not a multiple of " + equals("num_attention_heads", config.num_heads));
  config.head_dim = is_default ? stock_head_dim : config.hidden_size / config.num_heads;
  fields.read_int("head_dim", config.head_dim, kHeadDims);
  fields.require(config.head_dim % 2 == 0 && config.head_dim <= kHeadDims.max,
                 equals("head_dim", config.head_dim) + "; legal: even numbers from 2 to 1024");
}

std::string equals(const char* key, int64_t value) {
  return std::string(key) + " = " + std::to_string(value);
}

std::span<const FamilyRow> model_families() {
  static const std::vector<FamilyRow> families = make_families();
  return families;
}

}  // namespace fp4moe
