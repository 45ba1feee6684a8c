#include "io/write/make_tiny_files.h"

#include <algorithm>

#include "base/check.h"
#include "io/tokenizer/tiktoken.h"
#include "io/write/quantize_declaration.h"

namespace fp4moe {
namespace {

constexpr int64_t kNumSpecialTokens = 3, kNumBytes = 256;
constexpr const char* kSpecialTokens[kNumSpecialTokens] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

// The parts of the published models' config.json that determine tensors and computation.
struct Shape {
  const char* name;
  const char* dialect;
  const char* config;
  const char* base = nullptr;  // the shape whose (text) config this one changes, unless it is null
};

constexpr Shape kShapes[] = {
    {"gpt-oss-tiny", "gpt-oss", R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
      "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
      "num_local_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
      "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
      "attention_bias": true, "swiglu_limit": 7.0,
      "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}})"},
    {"gpt-oss-20b", "gpt-oss", R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
      "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
      "num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
      "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
      "attention_bias": true, "swiglu_limit": 7.0,
      "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}})"},
    {"gpt-oss-120b", "gpt-oss", R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
      "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
      "num_local_experts": 128, "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
      "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
      "attention_bias": true, "swiglu_limit": 7.0,
      "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}})"},
    {"qwen3-30b-a3b", "modelopt", R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
      "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
      "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
      "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
      "attention_bias": false, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
      "use_sliding_window": false, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})"},
    {"qwen3-moe-tiny", "modelopt", R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
      "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
      "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
      "attention_bias": false, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
      "use_sliding_window": false, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})"},
    {"qwen2-moe-tiny", "modelopt", R"({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
      "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
      "shared_expert_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 16,
      "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
      "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "qkv_bias": true, "norm_topk_prob": false,
      "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": false,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})"},
    {"deepseek-v3-tiny", "modelopt", R"({"architectures": ["DeepseekV3ForCausalLM"],
      "model_type": "deepseek_v3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
      "moe_intermediate_size": 128, "num_hidden_layers": 4, "n_routed_experts": 16, "n_shared_experts": 1,
      "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
      "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
      "topk_method": "noaux_tc", "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128,
      "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
      "rope_interleave": true, "max_position_embeddings": 163840, "rms_norm_eps": 1e-06,
      "attention_bias": false,
      "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                          "original_max_position_embeddings": 4096}})"},
    {"deepseek-v3", "modelopt", R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
      "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
      "num_hidden_layers": 61, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
      "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": true,
      "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
      "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": true,
      "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "attention_bias": false,
      "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                          "original_max_position_embeddings": 4096}})"},
    {"kimi-k2", "modelopt", R"({"model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
      "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
      "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "max_position_embeddings": 131072,
      "rope_parameters": {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0}})",
     "deepseek-v3"},
    {"kimi-k2.5", "modelopt", R"({"architectures": ["KimiK25ForConditionalGeneration"],
      "model_type": "kimi_k25", "vision_config": {},
      "text_config": {"max_position_embeddings": 262144, "rms_norm_eps": 1e-05,
                      "rope_parameters": {"factor": 64.0}}})",
     "kimi-k2"},
    {"glm-4.5", "modelopt", R"({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
      "vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
      "num_hidden_layers": 92, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
      "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "norm_topk_prob": true,
      "routed_scaling_factor": 2.5, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
      "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "attention_bias": true, "use_qk_norm": true,
      "partial_rotary_factor": 0.5,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})"},
    {"glm-4.5-air", "modelopt", R"({"hidden_size": 4096, "intermediate_size": 10944,
      "moe_intermediate_size": 1408, "num_hidden_layers": 46, "n_routed_experts": 128,
      "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": false})",
     "glm-4.5"},
    {"glm-4.6", "modelopt", R"({"max_position_embeddings": 202752})", "glm-4.5"},
    {"glm-4.7", "modelopt", R"({"max_position_embeddings": 202752})", "glm-4.5"},
    {"glm-4.7-flash", "modelopt", R"({"architectures": ["Glm4MoeLiteForCausalLM"],
      "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
      "moe_intermediate_size": 1536, "num_hidden_layers": 47, "n_routed_experts": 64, "n_shared_experts": 1,
      "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
      "norm_topk_prob": true, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc",
      "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
      "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_interleave": true,
      "max_position_embeddings": 202752, "rms_norm_eps": 1e-05, "attention_bias": false,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})"},
    {"qwen3-vl-30b-a3b", "modelopt", R"({"architectures": ["Qwen3VLMoeForConditionalGeneration"],
      "model_type": "qwen3_vl_moe", "vision_config": {},
      "text_config": {"architectures": null, "model_type": "qwen3_vl_moe_text",
                      "max_position_embeddings": 262144,
                      "rope_parameters": {"rope_theta": 5000000.0, "mrope_interleaved": true,
                                          "mrope_section": [24, 20, 20]}}})",
     "qwen3-30b-a3b"},
    {"qwen3-vl-235b-a22b", "modelopt", R"({"architectures": ["Qwen3VLMoeForConditionalGeneration"],
      "model_type": "qwen3_vl_moe", "vision_config": {},
      "text_config": {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                      "num_hidden_layers": 94, "num_attention_heads": 64}})",
     "qwen3-vl-30b-a3b"},
    {"qwen3-next-80b-a3b", "modelopt", R"({"architectures": ["Qwen3NextForCausalLM"],
      "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
      "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 48,
      "num_experts": 512, "num_experts_per_tok": 10, "num_attention_heads": 16, "num_key_value_heads": 2,
      "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
      "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
      "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "attention_bias": false,
      "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
      "partial_rotary_factor": 0.25,
      "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0}})"},
    {"qwen3-next-tiny", "modelopt", R"({"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
      "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_hidden_layers": 4,
      "num_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 4, "head_dim": 64,
      "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
      "linear_key_head_dim": 24, "linear_value_head_dim": 32})",
     "qwen3-next-80b-a3b"},
    {"qwen3.5-35b-a3b", "modelopt", R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"],
      "model_type": "qwen3_5_moe", "vision_config": {},
      "text_config": {"architectures": null, "model_type": "qwen3_5_moe_text", "vocab_size": 248320,
                      "intermediate_size": null, "num_hidden_layers": 40, "num_experts": 256,
                      "num_experts_per_tok": 8, "norm_topk_prob": null, "decoder_sparse_step": null,
                      "mlp_only_layers": null, "mamba_ssm_dtype": "float32", "attn_output_gate": true,
                      "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10]}}})",
     "qwen3-next-80b-a3b"},
    {"qwen3.5-122b-a10b", "modelopt", R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"],
      "model_type": "qwen3_5_moe", "vision_config": {},
      "text_config": {"hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
                      "shared_expert_intermediate_size": 1024}})",
     "qwen3.5-35b-a3b"},
    {"qwen3.5-397b-a17b", "modelopt", R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"],
      "model_type": "qwen3_5_moe", "vision_config": {},
      "text_config": {"hidden_size": 4096, "num_hidden_layers": 60, "num_experts": 512,
                      "num_experts_per_tok": 10}})",
     "qwen3.5-122b-a10b"},
    {"qwen3.5-moe-tiny", "modelopt", R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"],
      "model_type": "qwen3_5_moe", "vision_config": {},
      "text_config": {"vocab_size": 1024, "hidden_size": 256, "moe_intermediate_size": 128,
                      "shared_expert_intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 16,
                      "num_experts_per_tok": 4, "num_attention_heads": 4, "head_dim": 64,
                      "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 16,
                      "linear_key_head_dim": 32, "linear_value_head_dim": 20,
                      "rope_parameters": {"mrope_section": [4, 2, 2]}}})",
     "qwen3.5-35b-a3b"},
};

constexpr const char* kChatTemplate =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% "
    "endif %}";

Result<const Shape*> find_shape(const std::string& name) {
  std::string known;
  for (const Shape& shape : kShapes) {
    if (name == shape.name) return &shape;
    known += std::string(known.empty() ? "" : ", ") + shape.name;
  }
  return invalid_argument("like = '" + name + "'; legal: " + known);
}

// The keys of the text model: those of text_config if the model has other parts too.
Json& text_keys_of(Json& config) { return config.contains("text_config") ? config["text_config"] : config; }

Json config_of(const Shape& shape) {
  Json config = Json::parse(shape.config);
  if (shape.base == nullptr) return config;
  const auto base = std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& other) {
    return std::string_view(other.name) == shape.base;
  });
  FP4MOE_CHECK(base != std::end(kShapes), shape.base);
  Json whole_base = config_of(*base), text = text_keys_of(whole_base);
  text.merge_patch(text_keys_of(config));
  text_keys_of(config) = std::move(text);
  return config;
}

// Sets the first of `keys` that the config has; returns an error if it has none of them.
Status override_size(Json& config, const char* option, std::initializer_list<const char*> keys,
                     const std::optional<int64_t>& value) {
  if (!value.has_value()) return {};
  for (const char* key : keys)
    if (config.contains(key)) {
      config[key] = *value;
      return {};
    }
  return invalid_argument(std::string(option) + " does not exist in " +
                          config["model_type"].get<std::string>());
}

Status override_sizes(Json& config, const MakeTinyOptions& options) {
  struct Row {
    const char* option;
    std::initializer_list<const char*> keys;
    const std::optional<int64_t>& value;
  };
  const Row rows[] = {
      {"num_hidden_layers", {"num_hidden_layers"}, options.num_hidden_layers},
      {"hidden_size", {"hidden_size"}, options.hidden_size},
      {"intermediate_size", {"moe_intermediate_size", "intermediate_size"}, options.intermediate_size},
      {"num_experts", {"num_local_experts", "num_experts", "n_routed_experts"}, options.num_experts},
      {"top_k", {"num_experts_per_tok"}, options.top_k},
      {"num_heads", {"num_attention_heads"}, options.num_heads},
      {"num_kv_heads", {"num_key_value_heads"}, options.num_kv_heads},
      {"head_dim", {"head_dim"}, options.head_dim},
      {"vocab_size", {"vocab_size"}, options.vocab_size},
      {"sliding_window", {"sliding_window"}, options.sliding_window},
      {"max_position_embeddings", {"max_position_embeddings"}, options.max_position_embeddings},
      {"num_dense_layers", {"first_k_dense_replace"}, options.num_dense_layers},
      {"num_groups", {"n_group"}, options.num_groups},
      {"top_k_groups", {"topk_group"}, options.top_k_groups},
  };
  for (const Row& row : rows) FP4MOE_RETURN_IF_ERROR(override_size(config, row.option, row.keys, row.value));
  if (config.contains("full_attention_interval") &&
      config["full_attention_interval"] > config["num_hidden_layers"])
    config["full_attention_interval"] = config["num_hidden_layers"];  // the last layer has full attention
  if (options.num_mtp_layers.has_value()) {
    const bool is_below_mtp = config.contains("linear_num_key_heads");
    if (!is_below_mtp && !config.contains("first_k_dense_replace"))
      return invalid_argument("num_mtp_layers does not exist in " + config["model_type"].get<std::string>());
    config[is_below_mtp ? "mtp_num_hidden_layers" : "num_nextn_predict_layers"] = *options.num_mtp_layers;
  }
  if (!options.dense_intermediate_size.has_value()) return {};
  if (!config.contains("moe_intermediate_size"))
    return invalid_argument("dense_intermediate_size does not exist in " +
                            config["model_type"].get<std::string>());
  config["intermediate_size"] = *options.dense_intermediate_size;
  return {};
}

void set_old_rope(Json& config) {
  Json scaling = config["rope_parameters"];
  config.erase("rope_parameters");
  config["rope_theta"] = scaling["rope_theta"];
  scaling.erase("rope_theta");
  config["rope_scaling"] = scaling["rope_type"] == "default" ? Json() : scaling;
}

// Returns patterns for the layers of multi-token prediction. Published exports forget "mtp.fc", which is
// bf16.
Patterns mtp_modules(const Json& config) {
  if (config.value("mtp_num_hidden_layers", 0) > 0) return {"mtp.layers.0*"};
  const int64_t num_layers = config["num_hidden_layers"], count = config.value("num_nextn_predict_layers", 0);
  Patterns patterns;
  for (int64_t i = 0; i < count; ++i)
    patterns.push_back("model.layers." + std::to_string(num_layers + i) + "*");
  return patterns;
}

// Returns GPT-2's printable stand-in for a byte, in UTF-8: the byte itself if it is printable, otherwise the
// next character from U+0100 on.
std::string byte_symbol(int byte) {
  const auto printable = [](int b) { return (b > 32 && b < 127) || (b > 160 && b != 173); };
  int code_point = byte;
  if (!printable(byte)) {
    code_point = 256;
    for (int b = 0; b < byte; ++b) code_point += !printable(b);
  }
  if (code_point < 128) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

// The name and flags of a special token.
Json added_token(const char* content) {
  return {{"content", content}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false},    {"normalized", false},  {"special", true}};
}

// tiktoken.model with the bytes as tokens.
std::string make_tiktoken() {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string lines;
  for (int byte = 0; byte < kNumBytes; ++byte)  // in base64: six bits, two bits, padding
    lines += std::string{kDigits[byte >> 2], kDigits[(byte & 3) << 4]} + "== " + std::to_string(byte) + "\n";
  return lines;
}

// tokenizer_config.json's names of the special tokens behind them.
Json make_tiktoken_specials() {
  Json named = Json::object();
  for (int64_t i = 0; i < kNumSpecialTokens; ++i)
    named[std::to_string(kNumBytes + i)] = added_token(kSpecialTokens[i]);
  return named;
}

Json make_tokenizer() {
  Json vocab = Json::object(), added = Json::array();
  for (int64_t id = 0; id < kNumSpecialTokens; ++id) {
    vocab[kSpecialTokens[id]] = id;
    added.push_back(added_token(kSpecialTokens[id]));
    added.back()["id"] = id;
  }
  for (int byte = 0; byte < kNumBytes; ++byte) vocab[byte_symbol(byte)] = kNumSpecialTokens + byte;
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", Json::array()}}}};
}

}  // namespace

std::vector<std::string> make_tiny_shapes() {
  std::vector<std::string> names;
  for (const Shape& shape : kShapes) names.push_back(shape.name);
  return names;
}

Result<MakeTinyFiles> make_tiny_files(const MakeTinyOptions& options) {
  FP4MOE_ASSIGN_OR_RETURN(const Shape* shape, find_shape(options.like));
  const std::string dialect = options.dialect == "auto" ? shape->dialect : options.dialect;
  const bool is_compressed = dialect == "compressed-nvfp4" || dialect == "compressed-mxfp4";
  if (dialect != "gpt-oss" && dialect != "modelopt" && dialect != "bf16" && !is_compressed)
    return invalid_argument("dialect = '" + dialect +
                            "'; legal: auto, gpt-oss, modelopt, compressed-nvfp4, compressed-mxfp4, bf16");
  if (options.rope_style != "new" && options.rope_style != "old")
    return invalid_argument("rope_style = '" + options.rope_style + "'; legal: new, old");
  if (options.tokenizer != "json" && options.tokenizer != "tiktoken")
    return invalid_argument("tokenizer = '" + options.tokenizer + "'; legal: json, tiktoken");
  const bool is_tiktoken = options.tokenizer == "tiktoken";
  const int64_t num_tokens = kNumBytes + (is_tiktoken ? kNumTiktokenSpecials : kNumSpecialTokens);
  const int64_t first_special = is_tiktoken ? kNumBytes : 0;
  MakeTinyFiles files;
  Json& config = files.config;
  config = config_of(*shape);
  Json& text = text_keys_of(config);
  FP4MOE_RETURN_IF_ERROR(override_sizes(text, options));
  if (text["vocab_size"] < num_tokens)
    return invalid_argument("vocab_size = " + text["vocab_size"].dump() + "; legal: at least " +
                            std::to_string(num_tokens) + ", the tokenizer's size");
  const Json eos = {first_special, first_special + 2};  // <|endoftext|>, <|im_end|>
  config.update({{"eos_token_id", eos},
                 {"bos_token_id", first_special},
                 {"pad_token_id", first_special},
                 {"hidden_act", "silu"},
                 {"tie_word_embeddings", false},
                 {"torch_dtype", "bfloat16"},
                 {"use_cache", true}});
  if (options.rope_style == "old") set_old_rope(text_keys_of(config));
  if (dialect == "gpt-oss")
    config["quantization_config"] = declare_gpt_oss();
  else if (is_compressed)
    config["quantization_config"] =
        declare_compressed(dialect == "compressed-mxfp4", {}, dialect == "compressed-nvfp4");
  else if (dialect == "modelopt")
    files.hf_quant = declare_modelopt(mtp_modules(text), true);
  files.generation = {{"eos_token_id", eos},
                      {"bos_token_id", first_special},
                      {"pad_token_id", first_special},
                      {"do_sample", false}};
  if (!is_tiktoken) files.tokenizer = make_tokenizer();
  if (is_tiktoken) files.tiktoken = make_tiktoken();
  files.tokenizer_config = {
      {"tokenizer_class", is_tiktoken ? "TikTokenTokenizer" : "PreTrainedTokenizerFast"},
      {"eos_token", kSpecialTokens[2]},
      {"pad_token", kSpecialTokens[0]},
      {"model_max_length", text_keys_of(config)["max_position_embeddings"]},
      {"chat_template", kChatTemplate}};
  if (is_tiktoken) files.tokenizer_config["added_tokens_decoder"] = make_tiktoken_specials();
  return files;
}

}  // namespace fp4moe
