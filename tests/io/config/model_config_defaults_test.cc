// Keys that a config.json lacks have the defaults of the stock Hugging Face classes.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "io/config/model_config.h"
#include "io/config/model_config_text.h"
#include "io/json_document.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

// All configuration values that the forward pass and the sampler use.
std::string text_of(const ModelConfig& c) {
  std::ostringstream text;
  const auto add = [&text](const auto&... values) { ((text << values << ' '), ...); };
  const auto add_all = [&](const auto& values) {
    for (const auto& value : values) add(value);
    add('|');
  };
  add(c.num_kv_heads, c.head_dim, c.dense_intermediate_size, c.num_shared_experts, c.shared_intermediate_size,
      c.shared_expert_gate, c.qk_norm, c.rms_norm_eps, c.attention_bias, c.attention_out_bias,
      c.tie_word_embeddings, c.rotary_dim);
  add(static_cast<int>(c.rope.type), c.rope.theta, c.rope.factor, c.rope.beta_fast, c.rope.beta_slow,
      c.rope.original_max_position_embeddings, c.rope.truncate, c.rope.attention_factor.value_or(-1),
      c.rope.mscale.value_or(-1), c.rope.mscale_all_dim.value_or(-1));
  add(c.swiglu_alpha, c.swiglu_limit, c.router.num_groups, c.router.top_k_groups, c.router.norm_top_k,
      c.router.scaling_factor, c.router.has_correction_bias, c.mla.q_lora_rank, c.mla.rope_interleave);
  add_all(c.layer_windows);
  add_all(c.layer_has_experts);
  add_all(c.eos_token_ids);
  return text.str();
}

std::string erased(const std::string& keys, const std::string& key) {
  Json json = Json::parse("{" + keys + "}");
  json.erase(key);
  const std::string text = json.dump();
  return text.substr(1, text.size() - 2);
}

// The defaults of transformers 5.23.0's GptOssConfig, DeepseekV3Config, Qwen3MoeConfig, Qwen2MoeConfig,
// Glm4MoeConfig and Glm4MoeLiteConfig. A second value must change the result, which proves that the key is
// read.
struct StockDefault {
  std::string config;
  const char *key, *stock, *other;
};

std::vector<StockDefault> stock_defaults() {
  const std::string gpt_oss = with(kGptOss, "num_attention_heads", "16");
  const std::string deepseek = with(with(kDeepseek, "n_routed_experts", "64"), "num_hidden_layers", "6");
  const std::string qwen3 = with(kQwen, "num_attention_heads", "16");
  const std::string qwen2 = with(with(kQwen2, "num_attention_heads", "16"), "head_dim", "16");
  const std::string slides3 = with(qwen3, "use_sliding_window", "true");
  const std::string slides2 = with(with(qwen2, "use_sliding_window", "true"), "num_hidden_layers", "32");
  const char* yarn =
      R"({"rope_type": "yarn", "rope_theta": 150000, "factor": 32, "beta_fast": 32, "beta_slow": 1,
                         "truncate": false, "original_max_position_embeddings": 4096})";
  return {
      {gpt_oss, "rope_parameters", yarn, R"({"rope_type": "default", "rope_theta": 150000})"},
      {gpt_oss, "rope_theta", "150000", "10000"},
      {gpt_oss, "head_dim", "64", "32"},
      {gpt_oss, "num_key_value_heads", "8", "16"},
      {gpt_oss, "sliding_window", "128", "64"},
      {gpt_oss, "layer_types", R"(["sliding_attention", "full_attention", "sliding_attention",
                                           "full_attention"])",
       R"(["full_attention", "full_attention", "full_attention", "full_attention"])"},
      {gpt_oss, "rms_norm_eps", "1e-5", "1e-6"},
      {gpt_oss, "attention_bias", "true", "false"},
      {gpt_oss, "tie_word_embeddings", "false", "true"},
      {gpt_oss, "swiglu_limit", "7", "6"},
      {gpt_oss, "swiglu_alpha", "1.702", "1.5"},
      {deepseek, "n_shared_experts", "1", "2"},
      {deepseek, "q_lora_rank", "1536", "null"},
      {deepseek, "n_group", "8", "4"},
      {deepseek, "topk_group", "4", "2"},
      {deepseek, "routed_scaling_factor", "2.5", "1"},
      {deepseek, "first_k_dense_replace", "3", "0"},
      {deepseek, "norm_topk_prob", "true", "false"},
      {deepseek, "rope_interleave", "true", "false"},
      {deepseek, "rope_theta", "10000", "5000"},
      {deepseek, "rms_norm_eps", "1e-6", "1e-5"},
      {deepseek, "attention_bias", "false", "true"},
      {deepseek, "eos_token_id", "1", "null"},
      {qwen3, "num_key_value_heads", "4", "2"},
      {qwen3, "head_dim", "16", "32"},
      {qwen3, "intermediate_size", "6144", "512"},
      {qwen3, "norm_topk_prob", "false", "true"},
      {qwen3, "decoder_sparse_step", "1", "2"},
      {qwen3, "mlp_only_layers", "[]", "[1]"},
      {qwen3, "attention_bias", "false", "true"},
      {qwen3, "use_sliding_window", "false", "true"},
      {slides3, "sliding_window", "4096", "null"},
      {qwen3, "rope_theta", "10000", "1000000"},
      {qwen3, "eos_token_id", "null", "7"},
      {qwen2, "num_key_value_heads", "16", "4"},
      {qwen2, "intermediate_size", "5632", "512"},
      {qwen2, "qkv_bias", "true", "false"},
      {slides2, "max_window_layers", "28", "32"},
  };
}

std::vector<StockDefault> glm_stock_defaults() {
  const std::string lite = with(without(kGlmLite, "first_k_dense_replace"), "topk_group", "1");
  return {
      {kGlm, "num_key_value_heads", "8", "2"},
      {kGlm, "intermediate_size", "10944", "512"},
      {kGlm, "rms_norm_eps", "1e-5", "1e-6"},
      {kGlm, "attention_bias", "false", "true"},
      {kGlm, "use_qk_norm", "false", "true"},
      {kGlm, "partial_rotary_factor", "0.5", "1"},
      {kGlm, "n_shared_experts", "1", "2"},
      {kGlm, "n_group", "1", "4"},
      {kGlm, "routed_scaling_factor", "1", "2.5"},
      {kGlm, "first_k_dense_replace", "1", "0"},
      {kGlm, "norm_topk_prob", "true", "false"},
      {kGlm, "rope_theta", "10000", "1000000"},
      {kGlm, "eos_token_id", "null", "7"},
      {lite, "intermediate_size", "10240", "512"},
      {lite, "q_lora_rank", "768", "null"},
      {lite, "n_group", "1", "4"},
      {lite, "routed_scaling_factor", "1.8", "1"},
      {lite, "mlp_layer_types", R"(["dense", "sparse", "sparse", "sparse"])",
       R"(["sparse", "sparse", "dense", "sparse"])"},
      {lite, "rms_norm_eps", "1e-5", "1e-6"},
      {lite, "rope_interleave", "true", "false"},
      {lite, "eos_token_id", "1", "null"},
  };
}

TEST(ModelConfig, MissingKeysAreTheStockClassesDefaults) {
  std::vector<StockDefault> rows = stock_defaults();
  for (StockDefault& row : glm_stock_defaults()) rows.push_back(std::move(row));
  for (const StockDefault& row : rows) {
    SCOPED_TRACE(row.key);
    const std::string present = with(row.config, row.key, row.stock);
    const auto missing = parse(erased(present, row.key)), stock = parse(present),
               other = parse(with(row.config, row.key, row.other));
    ASSERT_TRUE(is_ok(missing) && is_ok(stock) && is_ok(other))
        << missing.status().to_string() << stock.status().to_string() << other.status().to_string();
    EXPECT_EQ(text_of(*missing), text_of(*stock));
    EXPECT_NE(text_of(*other), text_of(*stock));
  }
}

TEST(ModelConfig, NullIsNotAMissingKey) {
  const auto plain = parse(without(kGptOss, "num_key_value_heads"));
  ASSERT_TRUE(is_ok(plain));
  EXPECT_EQ(plain->num_kv_heads, 4) << "null means the number of query heads";
  // The stock class replaces either key by YaRN.
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto rope = parse(with(kGptOss, key, "null"));
    ASSERT_TRUE(is_ok(rope));
    EXPECT_EQ(rope->rope.type, RopeConfig::Type::kYarn);
    EXPECT_EQ(rope->rope.original_max_position_embeddings, 4096);
  }
  const auto ungrouped = parse(without(without(kDeepseek, "n_group"), "topk_group"));
  ASSERT_TRUE(is_ok(ungrouped));
  EXPECT_EQ(ungrouped->router.num_groups, 1);
}

}  // namespace
}  // namespace fp4moe
