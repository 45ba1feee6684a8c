#include "io/config/eagle3_config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "io/config/model_config_text.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

using Ids = std::vector<int64_t>;

// SpecForge's format, for a target of kGptOss's sizes.
const std::string kHead = R"(
  "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
  "intermediate_size": 640, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
  "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 150000,
  "rope_scaling": null, "draft_vocab_size": 320)";

const std::string kSpeculators = R"(
  "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 320,
  "norm_before_residual": true, "target_hidden_size": null, "eagle_aux_hidden_state_layer_ids": [2, 4, 9],
  "transformer_layer_config": {"model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 640, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000, "factor": 4.0}})";

ModelConfig target_of(int64_t num_layers, const std::string& keys = kGptOss) {
  auto config = parse(with(keys, "num_hidden_layers", std::to_string(num_layers)));
  EXPECT_TRUE(is_ok(config));
  return *config;
}

Result<Eagle3Config> parse_head(const std::string& keys, int64_t num_layers = 12) {
  return parse_eagle3_config("{" + keys + "}", target_of(num_layers));
}

std::string eagle(const std::string& keys) { return with(kHead, "eagle_config", "{" + keys + "}"); }

void expect_refused(const std::string& keys, StatusCode code, const std::vector<std::string>& parts) {
  const auto config = parse_head(keys);
  ASSERT_FALSE(config.ok()) << keys;
  EXPECT_EQ(config.status().code(), code) << config.status().message();
  for (const std::string& part : parts)
    EXPECT_NE(config.status().message().find(part), std::string::npos) << config.status().message();
}

TEST(Eagle3Config, ReadsTheSizes) {
  const auto config = parse_head(kHead);
  ASSERT_TRUE(is_ok(config));
  const ModelConfig& layers = config->layers;
  EXPECT_EQ(layers.hidden_size, 256);
  EXPECT_EQ(layers.dense_intermediate_size, 640);
  EXPECT_EQ(layers.num_layers, 1);
  EXPECT_EQ(layers.num_heads, 8);
  EXPECT_EQ(layers.num_kv_heads, 2);
  EXPECT_EQ(layers.head_dim, 64);
  EXPECT_EQ(layers.rotary_dim, 64);
  EXPECT_EQ(layers.vocab_size, 320);
  EXPECT_EQ(layers.rms_norm_eps, 1e-5);
  EXPECT_EQ(layers.rope.theta, 150000);
  EXPECT_EQ(layers.rope.type, RopeConfig::Type::kDefault);  // not the target's YaRN
  EXPECT_EQ(layers.max_position_embeddings, 131072);        // the target's
  EXPECT_EQ(layers.layer_windows, Ids{0});
  EXPECT_EQ(config->target_vocab_size, 1024);
  EXPECT_EQ(config->target_hidden_size, 256);
  EXPECT_EQ(config->feature_width(), 768);
  EXPECT_TRUE(config->has_fc());
  EXPECT_FALSE(config->norm_before_fc || config->fc_norm || config->norm_before_residual ||
               config->norm_output);
}

TEST(Eagle3Config, ReadsSpeculatorsFormat) {
  const auto config = parse_head(kSpeculators);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->layers.vocab_size, 320);
  EXPECT_EQ(config->target_vocab_size, 1024);
  EXPECT_EQ(config->layers.head_dim, 32);
  EXPECT_EQ(config->layers.rms_norm_eps, 1e-6);
  EXPECT_EQ(config->layers.rope.type, RopeConfig::Type::kYarn);
  EXPECT_EQ(config->layers.rope.original_max_position_embeddings, 2048);  // the head's default
  EXPECT_TRUE(config->norm_before_residual);
  EXPECT_EQ(config->after_layers, (Ids{1, 3, 8}));
  expect_refused(without(kSpeculators, "norm_before_residual"), StatusCode::kInvalidArgument,
                 {"norm_before_residual is missing"});
}

TEST(Eagle3Config, AnAbsentDraftVocabularyIsTheTargets) {
  for (const std::string& keys :
       {without(kHead, "draft_vocab_size"), with(kHead, "draft_vocab_size", "1024")}) {
    const auto config = parse_head(keys);
    ASSERT_TRUE(is_ok(config));
    EXPECT_EQ(config->layers.vocab_size, 1024);
  }
}

TEST(Eagle3Config, DefaultLayersAreTheSecondTheMiddleAndTheFourthLast) {
  for (int64_t n = 7; n <= 64; ++n) {
    const auto config = parse_head(kHead, n);
    ASSERT_TRUE(is_ok(config));
    EXPECT_EQ(config->after_layers, (Ids{1, n / 2 - 1, n - 4})) << n;
  }
  for (int64_t n = 1; n < 7; ++n) EXPECT_FALSE(parse_head(kHead, n).ok()) << n;
}

// Every ascending list of three layers, as each format writes it.
TEST(Eagle3Config, ListsNameTheLayersBeforeOrAfterTheFeatures) {
  const int64_t n = 7;
  const auto list = [](int64_t a, int64_t b, int64_t c) {
    return "[" + std::to_string(a) + "," + std::to_string(b) + "," + std::to_string(c) + "]";
  };
  for (int64_t a = 0; a < n; ++a)
    for (int64_t b = a + 1; b < n; ++b)
      for (int64_t c = b + 1; c < n; ++c) {
        const std::string after = list(a, b, c), before = list(a + 1, b + 1, c + 1);
        const auto speculators =
            parse_head(with(kSpeculators, "eagle_aux_hidden_state_layer_ids", before), n);
        ASSERT_TRUE(is_ok(speculators));
        EXPECT_EQ(speculators->after_layers, (Ids{a, b, c}));
        const auto specforge = parse_head(eagle(R"("eagle_aux_hidden_state_layer_ids": )" + after), n);
        ASSERT_TRUE(is_ok(specforge));
        EXPECT_EQ(specforge->after_layers, (Ids{a, b, c}));
        if (c + 1 < n) continue;  // a list with the number of layers counts from 1
        const auto final_layer = parse_head(eagle(R"("eagle_aux_hidden_state_layer_ids": )" + before), n);
        ASSERT_TRUE(is_ok(final_layer));
        EXPECT_EQ(final_layer->after_layers, (Ids{a, b, c}));
      }
}

TEST(Eagle3Config, RefusesOtherLists) {
  const std::string key = R"("eagle_aux_hidden_state_layer_ids": )";
  for (const char* ids : {"[3, 1, 5]", "[1, 1, 2]", "[0, 4, 12]"})
    expect_refused(eagle(key + ids), StatusCode::kInvalidArgument, {"ascending numbers from 0 to 11"});
  for (const char* ids : {"[1, 2, 13]", "[-1, 2, 3]", "[1, 2.5, 3]", "[1, \"2\", 3]", "{}"})
    expect_refused(eagle(key + ids), StatusCode::kInvalidArgument, {"eagle_aux_hidden_state_layer_ids"});
  expect_refused(with(kSpeculators, "eagle_aux_hidden_state_layer_ids", "[0, 2, 3]"),
                 StatusCode::kInvalidArgument, {"whole numbers from 1 to 12"});
  expect_refused(eagle(key + "[1, 2, 3]") + ", " + key + "[1, 2, 3]", StatusCode::kInvalidArgument,
                 {"at the top level and also in eagle_config"});
}

TEST(Eagle3Config, MayHaveAnyNumberOfFeatures) {
  const auto five = parse_head(eagle(R"("eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 9],
                                        "num_aux_hidden_states": 5)"));
  ASSERT_TRUE(is_ok(five));
  EXPECT_EQ(five->feature_width(), 5 * 256);
  EXPECT_TRUE(is_ok(parse_head(with(kHead, "num_aux_hidden_states", "3"))));
  expect_refused(with(kHead, "num_aux_hidden_states", "4"), StatusCode::kInvalidArgument,
                 {"num_aux_hidden_states = 4", "3 layers"});
}

TEST(Eagle3Config, MayTakeTheFinalNormsOutput) {
  const auto config = parse_head(eagle(R"("use_aux_hidden_state": false,
                                          "eagle_aux_hidden_state_layer_ids": [])"));
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->after_layers, Ids{});
  EXPECT_EQ(config->feature_width(), 256);
  EXPECT_FALSE(config->has_fc());
  expect_refused(eagle(R"("use_aux_hidden_state": false, "eagle_aux_hidden_state_layer_ids": [1, 2, 3])"),
                 StatusCode::kInvalidArgument, {"[1,2,3] with use_aux_hidden_state = false"});
  expect_refused(eagle(R"("use_aux_hidden_state": false, "fc_norm": true)"), StatusCode::kUnsupported,
                 {"fc_norm"});
}

TEST(Eagle3Config, ReadsNormsAtBothPlaces) {
  struct Row {
    const char* key;
    bool Eagle3Config::*field;
  };
  const Row rows[] = {{"norm_before_fc", &Eagle3Config::norm_before_fc},
                      {"fc_norm", &Eagle3Config::fc_norm},
                      {"use_aux_norm", &Eagle3Config::fc_norm},
                      {"norm_before_residual", &Eagle3Config::norm_before_residual},
                      {"norm_output", &Eagle3Config::norm_output}};
  for (const Row& row : rows) {
    const std::string on = std::string("\"") + row.key + "\": true";
    for (const std::string& keys : {kHead + ", " + on, eagle(on), eagle(on) + ", " + on}) {
      const auto config = parse_head(keys);
      ASSERT_TRUE(is_ok(config));
      EXPECT_TRUE(*config.*row.field) << row.key;
    }
    expect_refused(eagle(on) + ", \"" + row.key + "\": false", StatusCode::kInvalidArgument,
                   {row.key, "contradicts"});
  }
  expect_refused(kHead + R"(, "norm_before_fc": true, "fc_norm": true)", StatusCode::kUnsupported,
                 {"norm_before_fc = true and fc_norm = true"});
}

TEST(Eagle3Config, RefusesOtherSwitchesByName) {
  const std::pair<const char*, const char*> supported[] = {{"use_input_layernorm_in_first_layer", "true"},
                                                           {"use_last_layernorm", "true"},
                                                           {"use_mtp_layernorm", "false"},
                                                           {"next_layer_regular", "true"},
                                                           {"parallel_draft_step", "1"}};
  for (const auto& [key, value] : supported) {
    const auto keys_of = [&](const std::string& text) { return std::string("\"") + key + "\": " + text; };
    EXPECT_TRUE(is_ok(parse_head(eagle(keys_of(value)))));
    EXPECT_TRUE(is_ok(parse_head(eagle(keys_of("null")))));
    const std::string other = std::string(value) == "1"      ? "2"
                              : std::string(value) == "true" ? "false"
                                                             : "true";
    expect_refused(eagle(keys_of(other)), StatusCode::kUnsupported,
                   {"eagle_config: " + std::string(key) + " = " + other, std::string("supported: ") + value});
    expect_refused(kHead + ", " + keys_of(other), StatusCode::kUnsupported, {key});
  }
  for (const char* value : {"true", "1", "\"x\"", "[0]", "{\"a\": 1}", "0.5"})
    expect_refused(eagle(std::string("\"tree_depth\": ") + value), StatusCode::kUnsupported,
                   {"eagle_config: tree_depth"});
  for (const char* value : {"false", "0", "\"\"", "[]", "{}", "null"})
    EXPECT_TRUE(is_ok(parse_head(eagle(std::string("\"tree_depth\": ") + value))));
}

TEST(Eagle3Config, RefusesOtherLayers) {
  for (const char* key : {"attention_bias", "mlp_bias", "bias", "tie_word_embeddings", "use_sliding_window"})
    expect_refused(with(kHead, key, "true"), StatusCode::kUnsupported, {std::string(key) + " = true"});
  expect_refused(with(kHead, "hidden_act", "\"gelu\""), StatusCode::kUnsupported, {"gelu"});
  expect_refused(with(kHead, "layer_types", R"(["sliding_attention"])"), StatusCode::kUnsupported,
                 {"sliding_attention"});
  expect_refused(with(kHead, "quantization_config", "{}"), StatusCode::kUnsupported, {"quantization_config"});
  expect_refused(with(kHead, "model_type", "\"qwen3\""), StatusCode::kUnsupported, {"model_type", "qwen3"});
  expect_refused(with(kHead, "architectures", R"(["LlamaForCausalLM"])"), StatusCode::kUnsupported,
                 {"'LlamaForCausalLM' is not an EAGLE-3 head"});
  expect_refused(with(kHead, "rope_scaling", R"({"rope_type": "llama3", "factor": 8.0})"),
                 StatusCode::kUnsupported, {"llama3"});
  expect_refused(with(kHead, "num_key_value_heads", "3"), StatusCode::kInvalidArgument,
                 {"num_attention_heads = 8 is not a multiple of num_key_value_heads = 3"});
  for (const char* key : {"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"})
    expect_refused(without(kHead, key), StatusCode::kInvalidArgument, {std::string(key) + " is missing"});
  for (const char* key : {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
                          "vocab_size", "draft_vocab_size", "target_hidden_size"})
    for (const char* value : {"0", "-1", "1.5", "9223372036854775807", "\"7\""})
      expect_refused(with(kHead, key, value), StatusCode::kInvalidArgument, {key});
}

TEST(Eagle3Config, RefusesAHeadForAnotherTarget) {
  expect_refused(with(kHead, "hidden_size", "128"), StatusCode::kUnsupported,
                 {"hidden_size = 128", "hidden_size = 256"});
  expect_refused(with(kHead, "target_hidden_size", "512"), StatusCode::kUnsupported,
                 {"target_hidden_size = 512", "hidden_size = 256"});
  expect_refused(with(kHead, "vocab_size", "1000"), StatusCode::kUnsupported,
                 {"vocab_size = 1000", "vocab_size = 1024"});
  expect_refused(with(kHead, "draft_vocab_size", "1025"), StatusCode::kInvalidArgument,
                 {"draft_vocab_size = 1025 exceeds vocab_size = 1024"});
  const auto narrow = parse_head(with(with(kHead, "hidden_size", "128"), "target_hidden_size", "256"));
  ASSERT_TRUE(is_ok(narrow));
  EXPECT_EQ(narrow->layers.hidden_size, 128);
  EXPECT_EQ(narrow->feature_width(), 768);
  const auto latent = parse_eagle3_config("{" + kHead + "}", target_of(12, kDeepseek));
  ASSERT_FALSE(latent.ok());
  EXPECT_NE(latent.status().message().find("deepseek_v3, which has latent attention"), std::string::npos);
  EXPECT_TRUE(is_ok(parse_eagle3_config("{" + kHead + "}", target_of(12, kQwen))));
}

TEST(Eagle3Config, RefusesTextThatIsNotAnObject) {
  for (const char* text :
       {"", "[]", "7", "{", R"({"eagle_config": 3})", R"({"transformer_layer_config": []})"})
    EXPECT_FALSE(parse_eagle3_config(text, target_of(12)).ok()) << text;
}

}  // namespace
}  // namespace fp4moe
