// The families whose config.json differs from others in defaults, nesting or names: GLM, Kimi, Qwen3-VL and
// those with gated delta nets.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "io/config/model_config_text.h"
#include "io/config/quant_config.h"
#include "io/config/tensor_names.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument, kUnsupported = StatusCode::kUnsupported;

TEST(Glm, ReadsEveryKey) {
  const auto config = parse(kGlm, "", kNvfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kGlm4Moe);
  EXPECT_EQ(config->head_dim, 24) << "does not follow from 256 / 16";
  EXPECT_EQ(config->rotary_dim, 12);
  EXPECT_TRUE(config->qk_norm);
  EXPECT_TRUE(config->attention_bias);
  EXPECT_FALSE(config->attention_out_bias) << "the stock class has no bias on o";
  EXPECT_TRUE(config->router.has_correction_bias);
  EXPECT_EQ(config->router.num_groups, 1);
  EXPECT_EQ(config->router.scaling_factor, 2.5);
  EXPECT_EQ(config->shared_intermediate_size, 128);
  EXPECT_EQ(config->dense_intermediate_size, 512);
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{3, 5, 7}));
  EXPECT_EQ(config->mla.kv_lora_rank, 0);
  EXPECT_TRUE(config->text_prefix.empty());
}

TEST(Glm, TheFactorInRopeParametersWins) {
  const auto rotary_dim = [](const std::string& rope, const char* factor) {
    const auto config = parse(with(with(kGlm, "rope_parameters", rope), "partial_rotary_factor", factor));
    EXPECT_TRUE(is_ok(config));
    return config.ok() ? config->rotary_dim : 0;
  };
  EXPECT_EQ(rotary_dim(R"({"rope_type": "default", "partial_rotary_factor": 0.25})", "0.5"), 6);
  EXPECT_EQ(rotary_dim(R"({"rope_type": "default"})", "0.5"), 12);
  EXPECT_EQ(rotary_dim(R"({"rope_type": "default"})", "null"), 12) << "the stock class's default";
  EXPECT_EQ(rotary_dim("null", "1"), 24);
  EXPECT_EQ(rotary_dim(R"({"rope_type": "yarn", "factor": 4, "partial_rotary_factor": 0.35})", "1"), 8)
      << "rounded down";
}

TEST(Glm, RefusesBadValues) {
  struct Row {
    const char *key, *value, *named;
  };
  for (const Row& row :
       {Row{"partial_rotary_factor", "0.4", "rotates 9 dims"},
        Row{"partial_rotary_factor", "0.01", "rotates 0 dims"}, Row{"partial_rotary_factor", "1.5", "from"},
        Row{"use_qk_norm", "1", "true, false"}, Row{"first_k_dense_replace", "5", "from 0 to 4"},
        Row{"n_group", "3", "n_routed_experts = 16"}, Row{"scoring_func", "\"softmax\"", "sigmoid"},
        Row{"mlp_layer_types", R"(["dense"])", "1 entries"},
        Row{"mlp_layer_types", R"(["dense", "sparse", "moe", "sparse"])", "'moe'"},
        Row{"mlp_layer_types", R"(["sparse", "sparse", "sparse", "sparse"])", "first_k_dense_replace = 1"}})
    EXPECT_TRUE(fails_with(parse(with(kGlm, row.key, row.value)), kInvalid, {row.key, row.named}))
        << row.key << " = " << row.value;
}

TEST(GlmLite, IsDeepseekWithItsOwnDefaults) {
  const auto config = parse(with(without(kGlmLite, "first_k_dense_replace"), "mlp_layer_types",
                                 R"(["sparse", "dense", "sparse", "sparse"])"),
                            "", kNvfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kDeepseekV3);
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{true, false, true, true}));
  EXPECT_EQ(config->router.num_groups, 1);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_EQ(config->rotary_dim, 32);
  EXPECT_TRUE(fails_with(parse(with(kGlmLite, "partial_rotary_factor", "0.5")), kUnsupported,
                         {"partial_rotary_factor = 0.5", "1"}));
}

TEST(Kimi, TheTextModelIsReadFromTextConfig) {
  const auto plain = parse(kKimi, "", kNvfp4), nested_config = parse(kKimi25, "", kNvfp4);
  ASSERT_TRUE(is_ok(plain) && is_ok(nested_config));
  for (const auto* config : {&*plain, &*nested_config}) {
    EXPECT_EQ(config->family, ModelFamily::kDeepseekV3);
    EXPECT_EQ(config->hidden_size, 256);
    EXPECT_EQ(config->mla.kv_lora_rank, 64);
    EXPECT_EQ(config->eos_token_ids, std::vector<int32_t>{1});
    EXPECT_FALSE(config->tie_word_embeddings);
  }
  EXPECT_EQ(plain->text_prefix, "");
  EXPECT_EQ(nested_config->text_prefix, "language_model.");
  EXPECT_EQ(nested_config->model_type, "kimi_k25");
  EXPECT_TRUE(is_ok(parse(with(kKimi25, "architectures", R"(["Kimi_K25ForConditionalGeneration"])"))));
  const auto tied = parse(with(kKimi25, "tie_word_embeddings", "null"));
  ASSERT_TRUE(is_ok(tied));
  EXPECT_TRUE(tied->tie_word_embeddings) << "the stock class's default";
}

TEST(Nested, KeysOfTheWholeModelWin) {
  const std::string text = with(with(kKimi, "tie_word_embeddings", "true"), "torch_dtype", R"("float32")");
  const std::string whole = nested("KimiK25ForConditionalGeneration", "kimi_k25", text);
  const auto config = parse(whole + R"(, "eos_token_id": [4, 6])");
  ASSERT_TRUE(is_ok(config));
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_EQ(config->dense_dtype, DType::kF32) << "only text_config has the key";
  EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{4, 6}));
  const auto generation = parse(whole, R"({"eos_token_id": [8, 9]})");
  ASSERT_TRUE(is_ok(generation));
  EXPECT_EQ(generation->eos_token_ids, (std::vector<int32_t>{8, 9}));
}

TEST(Nested, BadFilesAreRefusedByName) {
  const auto kimi = [](const std::string& text) {
    return parse(nested("KimiK25ForConditionalGeneration", "kimi_k25", text));
  };
  EXPECT_TRUE(fails_with(parse(R"("model_type": "kimi_k25")"), kInvalid, {"text_config is missing"}));
  EXPECT_TRUE(fails_with(parse(R"("model_type": "kimi_k25", "text_config": 3)"), kInvalid, {"text_config"}));
  EXPECT_TRUE(fails_with(kimi(with(kKimi, "hidden_size", "0")), kInvalid, {"text_config: hidden_size = 0"}));
  EXPECT_TRUE(fails_with(kimi(with(kKimi, "model_type", R"("kimi_linear")")), kUnsupported,
                         {"text_config", "'kimi_linear'", "kimi_k25", "kimi_k2, deepseek_v3"}));
  EXPECT_TRUE(fails_with(parse(nested("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
                                      with(kQwenVlText, "model_type", "1"))),
                         kInvalid, {"text_config", "model_type"}));
}

TEST(QwenVl, ReadsTheTextModelWithItsOwnDefaults) {
  const auto text_with = [](const char* key, const char* value) {
    return parse(nested("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", with(kQwenVlText, key, value)),
                 "", kNvfp4);
  };
  const auto config = text_with("rope_parameters", R"({"rope_type": "default", "rope_theta": 5000000,
                                                       "mrope_section": [24, 20, 20]})");
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kQwen3Moe);
  EXPECT_EQ(config->text_prefix, "model.language_model.");
  EXPECT_EQ(config->rope.type, RopeConfig::Type::kDefault);
  EXPECT_EQ(config->rope.theta, 5000000);
  EXPECT_EQ(config->rotary_dim, 128);
  EXPECT_TRUE(config->qk_norm);
  EXPECT_TRUE(config->router.norm_top_k);
  const auto default_norm = text_with("norm_topk_prob", "null");
  ASSERT_TRUE(is_ok(default_norm));
  EXPECT_TRUE(default_norm->router.norm_top_k) << "the stock class always divides by the sum";
  EXPECT_TRUE(fails_with(text_with("norm_topk_prob", "false"), kInvalid, {"norm_topk_prob = false"}));
  const auto sliding = text_with("use_sliding_window", "true");
  ASSERT_TRUE(is_ok(sliding));
  EXPECT_EQ(sliding->layer_windows, std::vector<int64_t>(4, 0)) << "the stock class has no windows";
}

TEST(QwenNext, ReadsEveryKey) {
  const auto config = parse(kQwenNext, "", kNvfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kQwen3Next);
  const DeltaConfig& delta = config->delta;
  EXPECT_EQ(delta.num_key_heads, 4);
  EXPECT_EQ(delta.num_value_heads, 8);
  EXPECT_EQ(delta.key_head_dim, 24);
  EXPECT_EQ(delta.value_head_dim, 32);
  EXPECT_EQ(delta.conv_width, 3);
  EXPECT_EQ(delta.conv_channels(), 2 * 4 * 24 + 8 * 32);
  EXPECT_TRUE(delta.has_grouped_inputs);
  EXPECT_EQ(config->layer_has_state, (std::vector<bool>{true, false, true, false, true}));
  EXPECT_EQ(config->layer_windows, std::vector<int64_t>(5, 0));
  EXPECT_EQ(config->layer_has_experts, std::vector<bool>(5, true));
  EXPECT_TRUE(config->attention_gate && config->centered_norms && config->qk_norm);
  EXPECT_TRUE(config->shared_expert_gate);
  EXPECT_EQ(config->shared_intermediate_size, 192);
  EXPECT_EQ(config->rotary_dim, 32) << "a quarter of 128";
  EXPECT_EQ(config->num_mtp_layers, 0);
  EXPECT_TRUE(config->may_have_mtp_layer) << "it is not declared";
  EXPECT_EQ(config->mtp_layer, 5);
}

TEST(QwenNext, HasTheStockDefaults) {
  std::string keys = kQwenNext;
  for (const char* key : {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                          "linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval",
                          "shared_expert_intermediate_size", "norm_topk_prob", "intermediate_size"})
    keys = without(keys, key);
  // An absent head_dim has another default than a null one.
  keys.erase(keys.find("\"head_dim\": 128, "), std::string("\"head_dim\": 128, ").size());
  const auto config = parse(keys);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->delta.num_key_heads, 16);
  EXPECT_EQ(config->delta.num_value_heads, 32);
  EXPECT_EQ(config->delta.key_head_dim, 128);
  EXPECT_EQ(config->delta.value_head_dim, 128);
  EXPECT_EQ(config->delta.conv_width, 4);
  EXPECT_EQ(config->layer_has_state, (std::vector<bool>{true, true, true, false, true}));
  EXPECT_EQ(config->shared_intermediate_size, 512);
  EXPECT_EQ(config->dense_intermediate_size, 5632);
  EXPECT_EQ(config->head_dim, 256);
  EXPECT_EQ(config->rotary_dim, 64);
  EXPECT_TRUE(config->router.norm_top_k);
}

TEST(QwenNext, RefusesWhatItDoesNotRun) {
  struct Row {
    const char *key, *value;
    StatusCode code;
    const char* named;
  };
  for (const Row& row :
       {Row{"linear_num_key_heads", "3", kInvalid, "linear_num_value_heads = 8"},
        Row{"linear_num_key_heads", "0", kInvalid, "from 1"},
        Row{"linear_key_head_dim", "257", kInvalid, "256"},
        Row{"linear_value_head_dim", "0", kInvalid, "256"},
        Row{"linear_conv_kernel_dim", "9", kInvalid, "from 1 to 8"},
        Row{"full_attention_interval", "6", kInvalid, "no layer of 5"},
        Row{"full_attention_interval", "0", kInvalid, "from 1"},
        Row{"layer_types", R"(["full_attention"])", kInvalid, "1 entries"},
        Row{"layer_types", R"(["full_attention", "linear_attention", "mamba", "mamba", "mamba"])", kInvalid,
            "'mamba'"},
        Row{"attn_output_gate", "false", kUnsupported, "true"},
        Row{"mtp_num_hidden_layers", "-1", kInvalid, "from 0"},
        Row{"mtp_use_dedicated_embeddings", "true", kUnsupported, "false"},
        Row{"output_gate_type", R"("sigmoid")", kUnsupported, "swish, silu"},
        Row{"mamba_ssm_dtype", R"("bfloat16")", kUnsupported, "float32"}})
    EXPECT_TRUE(fails_with(parse(with(kQwenNext, row.key, row.value)), row.code, {row.key, row.named}))
        << row.key << " = " << row.value;
  EXPECT_TRUE(is_ok(parse(with(kQwenNext, "output_gate_type", R"("swish")"))));
  const auto dense = parse(with(with(kQwenNext, "mlp_only_layers", "[1]"), "norm_topk_prob", "false"));
  ASSERT_TRUE(is_ok(dense));
  EXPECT_EQ(dense->layer_has_experts, (std::vector<bool>{true, false, true, true, true}));
  EXPECT_FALSE(dense->router.norm_top_k);
}

TEST(Qwen35, TheTextModelIsReadFromTextConfig) {
  const auto plain = parse(kQwen35Text, "", kNvfp4), whole = parse(kQwen35, "", kNvfp4);
  ASSERT_TRUE(is_ok(plain) && is_ok(whole));
  for (const auto* config : {&*plain, &*whole}) {
    EXPECT_EQ(config->family, ModelFamily::kQwen3Next);
    EXPECT_FALSE(config->delta.has_grouped_inputs);
    EXPECT_EQ(config->delta.num_value_heads, 8);
    EXPECT_EQ(config->layer_has_state, (std::vector<bool>{true, false, true, false, true}));
    EXPECT_TRUE(config->centered_norms && config->router.norm_top_k);
  }
  EXPECT_EQ(plain->text_prefix, "");
  EXPECT_EQ(whole->text_prefix, "model.language_model.");
  EXPECT_TRUE(
      fails_with(parse(with(kQwen35Text, "norm_topk_prob", "false")), kInvalid, {"norm_topk_prob = false"}))
      << "the stock class always divides by the sum";
}

TEST(Quantization, MoonshotsInt4IsRefusedWithTheExportsThatRun) {
  const std::string int4 = R"(, "quantization_config": {"quant_method": "compressed-tensors",
      "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"], "config_groups": {"group_0": {
      "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": true}}}})";
  for (const std::string& keys :
       {kKimi + int4, kKimi25 + int4, nested("KimiK25ForConditionalGeneration", "kimi_k25", kKimi + int4)})
    EXPECT_TRUE(
        fails_with(parse(keys), kUnsupported, {"pack-quantized", "4-bit int", "nvidia/Kimi-K2.5-NVFP4"}));
  const auto deepseek = parse(kDeepseek + int4);
  EXPECT_TRUE(fails_with(deepseek, kUnsupported, {"pack-quantized", "4-bit int"}));
  EXPECT_EQ(deepseek.status().message().find("Kimi"), std::string::npos);
}

TEST(Quantization, PatternsMayNameModulesByStoredOrTextNames) {
  const auto quant = [](const char* pattern) {
    const auto config =
        parse(kKimi25, "",
              R"({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": [")" +
                  std::string(pattern) + "\"]}}");
    EXPECT_TRUE(is_ok(config));
    return config.ok() ? config->quant : QuantConfig{};
  };
  for (const char* pattern : {"language_model.model.layers.0*", "language_model.layers.0*", "model.layers.0*",
                              "*language_model*layers.0.*", "re:language_model.model.layers.0",
                              "re:.*language_model.*layers[.]0[.]", "re:model.layers.0"}) {
    EXPECT_TRUE(is_excluded(quant(pattern), "model.layers.0.mlp.up_proj")) << pattern;
    EXPECT_FALSE(is_excluded(quant(pattern), "model.layers.1.mlp.up_proj")) << pattern;
  }
  for (const char* pattern : {"language_model.lm_head", "lm_head", "language_model.*"})
    EXPECT_TRUE(is_excluded(quant(pattern), "lm_head")) << pattern;
  EXPECT_FALSE(is_excluded(quant("vision_tower*"), "model.layers.0.mlp.up_proj"));
}

TEST(TensorNames, ALayerBelowMtpIsALayerOfTheModel) {
  const std::pair<const char*, const char*> names[] = {
      {"mtp.fc.weight", "model.layers.40.eh_proj.weight"},
      {"mtp.pre_fc_norm_embedding.weight", "model.layers.40.enorm.weight"},
      {"mtp.pre_fc_norm_hidden.weight", "model.layers.40.hnorm.weight"},
      {"mtp.norm.weight", "model.layers.40.shared_head.norm.weight"},
      {"mtp.norm", "model.layers.40.shared_head.norm"},
      {"mtp.layers.0.mlp.experts.7.up_proj", "model.layers.40.mlp.experts.7.up_proj"}};
  for (const auto& [below, in_layer] : names)
    for (const char* prefix : {"", "language_model.", "model.language_model."}) {
      EXPECT_EQ(mtp_layer_name(below, 40), in_layer);
      EXPECT_EQ(stored_name(prefix, in_layer, 40), below);
      EXPECT_EQ(stored_name(prefix, in_layer), stored_name(prefix, in_layer, 39));
    }
  for (const char* name : {"mtp.layers.1.mlp.gate", "mtp.fcs.weight", "mtp.0.eh_proj", "lm_head.weight"}) {
    EXPECT_EQ(mtp_layer_name(name, 40), name);
    EXPECT_EQ(stored_name("", name, 40), name);
  }
}

TEST(TensorNames, StoredNamesMapToTextNamesAndBack) {
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.3.mlp.gate.weight", "model.norm.weight", "lm_head.weight"})
    for (const char* prefix : {"", "language_model.", "model.language_model."})
      EXPECT_EQ(text_model_name(stored_name(prefix, name)), name) << prefix;
  EXPECT_EQ(stored_name("language_model.", "lm_head.weight"), "language_model.lm_head.weight");
  EXPECT_EQ(stored_name("model.language_model.", "lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(text_model_name("language_model.layers.3.x"), "model.layers.3.x");
  for (const char* name : {"vision_tower.a", "mm_projector.b", "visual.c", "model.visual.c"}) {
    EXPECT_TRUE(is_vision_name(name)) << name;
    EXPECT_EQ(stored_name("language_model.", name), name);
    EXPECT_EQ(text_model_name(name), name);
  }
  for (const char* name : {"model.layers.0.visual.x", "visualise.x", "model.norm.weight", "vision_towers.x"})
    EXPECT_FALSE(is_vision_name(name)) << name;
}

}  // namespace
}  // namespace fp4moe
