// Valid config.json texts of every family, and changes to them.
#pragma once

#include <string>

#include "io/config/model_config.h"

namespace fp4moe {

// A valid gpt-oss config without its braces; tests replace or append keys.
inline const std::string kGptOss = R"(
  "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 1024, "hidden_size": 256,
  "num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128,
  "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 128,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "eos_token_id": [0, 2])";
inline const std::string kMxfp4 =
    R"(, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})";

inline const std::string kDeepseek = R"(
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 1024, "hidden_size": 256,
  "num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
  "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
  "kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 32,
  "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": true,
  "routed_scaling_factor": 2.5, "rope_theta": 10000, "eos_token_id": 1)";

inline const std::string kQwen = R"(
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 256,
  "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
  "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
  "max_position_embeddings": 4096, "norm_topk_prob": true, "rope_theta": 1000000, "rope_scaling": null)";
inline const std::string kNvfp4 =
    R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4",
  "kv_cache_quant_algo": null, "group_size": 16, "exclude_modules": ["lm_head"]}})";

inline Result<ModelConfig> parse(const std::string& keys, const std::string& generation = "",
                                 const std::string& quant = "") {
  return parse_model_config("{" + keys + "}", generation, quant);
}

// `keys` with the value of `key` (up to the next comma at top level, or the end) replaced.
inline std::string with(std::string keys, const std::string& key, const std::string& value) {
  const size_t at = keys.find("\"" + key + "\":");
  if (at == std::string::npos) return keys + ", \"" + key + "\": " + value;
  const size_t begin = keys.find(':', at) + 1;
  size_t end = begin;
  for (int depth = 0; end < keys.size() && (depth > 0 || keys[end] != ','); ++end)
    depth += (keys[end] == '[' || keys[end] == '{') - (keys[end] == ']' || keys[end] == '}');
  return keys.replace(begin, end - begin, value);
}

inline std::string without(const std::string& keys, const std::string& key) {
  return with(keys, key, "null");
}

inline const std::string kQwen2 =
    with(with(with(kQwen, "architectures", R"(["Qwen2MoeForCausalLM"])"), "model_type", R"("qwen2_moe")"),
         "shared_expert_intermediate_size", "192");

inline const std::string kGlm = R"(
  "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 1024, "hidden_size": 256,
  "num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
  "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 24,
  "max_position_embeddings": 4096, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
  "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "attention_bias": true,
  "partial_rotary_factor": 0.5, "use_qk_norm": true, "rope_theta": 1000000, "rope_scaling": null,
  "eos_token_id": [3, 5, 7])";

inline const std::string kGlmLite = with(with(without(without(kDeepseek, "n_group"), "topk_group"),
                                              "architectures", R"(["Glm4MoeLiteForCausalLM"])"),
                                         "model_type", R"("glm4_moe_lite")");

inline const std::string kKimi =
    with(with(with(kDeepseek, "model_type", R"("kimi_k2")"), "n_group", "1"), "topk_group", "1");

// A config whose text model is `text`.
inline std::string nested(const std::string& architecture, const std::string& model_type,
                          const std::string& text) {
  return "\"architectures\": [\"" + architecture + "\"], \"model_type\": \"" + model_type +
         "\", \"tie_word_embeddings\": false, \"vision_config\": {}, \"text_config\": {" + text + "}";
}
inline const std::string kQwenNext = R"(
  "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 1024, "hidden_size": 256,
  "num_hidden_layers": 5, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
  "intermediate_size": 512, "shared_expert_intermediate_size": 192, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 128, "full_attention_interval": 2, "linear_num_key_heads": 4,
  "linear_num_value_heads": 8, "linear_key_head_dim": 24, "linear_value_head_dim": 32,
  "linear_conv_kernel_dim": 3, "norm_topk_prob": true, "max_position_embeddings": 4096,
  "rope_theta": 1000000, "rope_scaling": null)";
inline const std::string kKimi25 = nested("KimiK25ForConditionalGeneration", "kimi_k25", kKimi);
inline const std::string kQwenVlText = with(kQwen, "model_type", R"("qwen3_vl_moe_text")");
inline const std::string kQwen35Text = with(with(kQwenNext, "model_type", R"("qwen3_5_moe_text")"),
                                            "architectures", R"(["Qwen3_5MoeForCausalLM"])");
inline const std::string kQwen35 = nested("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", kQwen35Text);

}  // namespace fp4moe
