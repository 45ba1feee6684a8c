#include "io/config/model_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "io/config/model_config_text.h"
#include "io/file.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

TEST(ModelConfig, ReadsGptOss) {
  const auto config = parse(kGptOss + kMxfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kGptOss);
  EXPECT_EQ(config->architecture, "GptOssForCausalLM");
  EXPECT_EQ(config->vocab_size, 1024);
  EXPECT_EQ(config->hidden_size, 256);
  EXPECT_EQ(config->num_layers, 4);
  EXPECT_EQ(config->num_experts, 16);
  EXPECT_EQ(config->top_k, 4);
  EXPECT_EQ(config->intermediate_size, 128);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->num_heads, 4);
  EXPECT_EQ(config->num_kv_heads, 2);
  EXPECT_EQ(config->max_position_embeddings, 131072);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_TRUE(config->attention_bias);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_EQ(config->swiglu_limit, 7.0f);
  EXPECT_EQ(config->dense_dtype, DType::kBF16);
  EXPECT_EQ(config->layer_windows, (std::vector<int64_t>{128, 0, 128, 0}));  // the default alternation
  EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(config->quant.method, QuantMethod::kMxfp4GptOss);
  EXPECT_EQ(config->quant.group_size, 32);
  EXPECT_EQ(config->quant.exclude_modules.all(), std::vector<std::string>{"lm_head"});
  EXPECT_EQ(config->rope.type, RopeConfig::Type::kYarn);  // the stock class's default
}

TEST(ModelConfig, ReadsTheCommittedDemo) {
  const auto config = load_model_config(FP4MOE_DEMO_MODEL);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kGptOss);
  EXPECT_EQ(config->rope.type, RopeConfig::Type::kYarn);
  EXPECT_EQ(config->rope.factor, 32);
  EXPECT_EQ(config->default_sampling.temperature, 0);  // do_sample false
}

TEST(ModelConfig, ReadsTheSecondDemo) {
  const auto config = load_model_config(FP4MOE_DEMO_DSV3);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kDeepseekV3);
  EXPECT_EQ(config->quant.method, QuantMethod::kModelOptNvfp4);
  EXPECT_EQ(config->shared_intermediate_size, 128);
  EXPECT_EQ(config->rope.type, RopeConfig::Type::kDefault);
  EXPECT_TRUE(config->mla.rope_interleave);
}

// Modules in other formats and FP8 experts are refused before any weight is read, unless they belong to the
// unused MTP layers.
TEST(ModelConfig, NamesModulesOfOtherAlgorithms) {
  const auto mixed = [](const std::string& module, const std::string& algorithm = "W4A8_AWQ") {
    return parse(kQwen, "",
                 R"({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
      "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, ")" +
                     module + R"(": {"quant_algo": ")" + algorithm + R"("}}}})");
  };
  EXPECT_TRUE(fails_with(mixed("model.layers.3.self_attn.q_proj"), StatusCode::kUnsupported,
                         {"hf_quant_config.json", "W4A8_AWQ", "model.layers.3.self_attn.q_proj", "FP4"}));
  EXPECT_TRUE(is_ok(mixed("model.layers.3.self_attn.q_proj", "FP8")));
  EXPECT_TRUE(fails_with(mixed("model.layers.3.mlp.experts", "FP8"), StatusCode::kUnsupported,
                         {"FP8", "model.layers.3.mlp.experts.0.up_proj", "routed experts in FP4"}));
  EXPECT_TRUE(is_ok(mixed("model.layers.4.self_attn.q_proj")));
  EXPECT_TRUE(is_ok(mixed("mtp.layers.0.self_attn.q_proj")));
}

TEST(ModelConfig, NamesAFolderThatDoesNotExist) {
  for (const char* folder : {"", "/none/such", FP4MOE_DEMO_MODEL "/config.json"})
    EXPECT_TRUE(fails_with(load_model_config(folder), StatusCode::kNotFound,
                           {"'" + std::string(folder) + "' does not exist", "config.json"}));
}

// Only a file that does not exist counts as absent.
TEST(ModelConfig, RefusesOptionalFilesWithoutContent) {
  for (const std::string name : {"generation_config.json", "hf_quant_config.json"}) {
    const TempFolder folder;
    std::filesystem::create_symlink(FP4MOE_DEMO_MODEL "/config.json", folder.file("config.json"));
    EXPECT_TRUE(is_ok(load_model_config(folder.path())));
    std::filesystem::create_symlink("../blobs/missing", folder.file(name));
    EXPECT_TRUE(fails_with(load_model_config(folder.path()), StatusCode::kNotFound,
                           {folder.file(name), "symbolic link to a missing file"}));
    std::filesystem::remove(folder.file(name));
    ASSERT_TRUE(is_ok(write_text_file(folder.file(name), "")));
    EXPECT_TRUE(
        fails_with(load_model_config(folder.path()), StatusCode::kDataLoss, {folder.file(name), "is empty"}));
  }
}

TEST(ModelConfig, ReadsLayerTypes) {
  const auto types = [](const char* value) { return parse(with(kGptOss, "layer_types", value)); };
  const auto config = types(R"(["full_attention","full_attention","sliding_attention","full_attention"])");
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->layer_windows, (std::vector<int64_t>{0, 0, 128, 0}));
  EXPECT_TRUE(fails_with(types(R"(["full_attention"])"), StatusCode::kInvalidArgument,
                         {"layer_types has 1 entries", "num_hidden_layers = 4"}));
  EXPECT_TRUE(
      fails_with(types(R"(["a","a","a","a"])"), StatusCode::kInvalidArgument, {"'a'", "sliding_attention"}));
  EXPECT_TRUE(fails_with(parse(with(kGptOss, "sliding_window", "null")), StatusCode::kInvalidArgument,
                         {"sliding_window"}));
}

TEST(ModelConfig, ReadsBothRopeSpellings) {
  const std::string yarn = R"("factor": 32.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": false,
                              "original_max_position_embeddings": 4096})";
  const auto check = [](const Result<ModelConfig>& config) {
    ASSERT_TRUE(is_ok(config));
    EXPECT_EQ(config->rope.type, RopeConfig::Type::kYarn);
    EXPECT_EQ(config->rope.theta, 150000);
    EXPECT_EQ(config->rope.factor, 32);
    EXPECT_EQ(config->rope.beta_fast, 16);
    EXPECT_EQ(config->rope.beta_slow, 2);
    EXPECT_EQ(config->rope.original_max_position_embeddings, 4096);
    EXPECT_FALSE(config->rope.truncate);
    EXPECT_FALSE(config->rope.attention_factor.has_value());
  };
  check(parse(kGptOss + R"(, "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000, )" + yarn));
  check(parse(kGptOss + R"(, "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", )" + yarn));
  check(parse(kGptOss + R"(, "rope_theta": 150000, "rope_scaling": {"type": "yarn", )" + yarn));
}

TEST(ModelConfig, RefusesWrongRope) {
  const auto rope = [](const char* value) { return parse(with(kGptOss, "rope_scaling", value)); };
  EXPECT_TRUE(fails_with(rope(R"({"rope_type": "llama3"})"), StatusCode::kUnsupported,
                         {"'llama3'", "default, yarn"}));
  EXPECT_TRUE(
      fails_with(rope(R"({"rope_type": "yarn"})"), StatusCode::kInvalidArgument, {"factor is missing"}));
  EXPECT_TRUE(fails_with(rope(R"({"rope_type": "yarn", "factor": 0.5})"), StatusCode::kInvalidArgument,
                         {"factor = 0.5"}));
  EXPECT_TRUE(fails_with(rope(R"({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2})"),
                         StatusCode::kInvalidArgument, {"beta_fast"}));
  EXPECT_TRUE(fails_with(rope(R"({"full_attention": {"rope_type": "default"}})"), StatusCode::kUnsupported,
                         {"'full_attention'"}));
  EXPECT_TRUE(fails_with(rope("7"), StatusCode::kInvalidArgument, {"rope_scaling = 7", "object"}));
  EXPECT_TRUE(
      fails_with(parse(with(kGptOss, "rope_theta", "0")), StatusCode::kInvalidArgument, {"rope_theta = 0"}));
}

TEST(ModelConfig, RefusesRouterWeightsOnTheInput) {
  EXPECT_TRUE(is_ok(parse(with(kDeepseek, "apply_router_weight_on_input", "false"))));
  EXPECT_TRUE(fails_with(parse(with(kDeepseek, "apply_router_weight_on_input", "true")),
                         StatusCode::kUnsupported, {"apply_router_weight_on_input = true", "false"}));
}

TEST(ModelConfig, ReadsDeepseekV3) {
  const auto config = parse(kDeepseek, "", kNvfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kDeepseekV3);
  EXPECT_EQ(config->quant.method, QuantMethod::kModelOptNvfp4);
  EXPECT_EQ(config->quant.group_size, 16);
  EXPECT_EQ(config->intermediate_size, 128);
  EXPECT_EQ(config->dense_intermediate_size, 512);
  EXPECT_EQ(config->num_shared_experts, 1);
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(config->router.num_groups, 4);
  EXPECT_EQ(config->router.top_k_groups, 2);
  EXPECT_EQ(config->router.scaling_factor, 2.5);
  EXPECT_TRUE(config->router.norm_top_k);
  EXPECT_EQ(config->mla.q_lora_rank, 128);
  EXPECT_EQ(config->mla.kv_lora_rank, 64);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_FALSE(config->attention_bias);
  EXPECT_TRUE(config->router.has_correction_bias);
  EXPECT_EQ(config->num_mtp_layers, 0);
  EXPECT_EQ(config->shared_intermediate_size, 128);
  EXPECT_TRUE(
      fails_with(parse(with(kDeepseek, "n_group", "3")), StatusCode::kInvalidArgument, {"n_group = 3"}));
  EXPECT_TRUE(fails_with(parse(with(kDeepseek, "topk_group", "5")), StatusCode::kInvalidArgument,
                         {"topk_group = 5"}));
  EXPECT_TRUE(fails_with(parse(with(kDeepseek, "num_experts_per_tok", "9")), StatusCode::kInvalidArgument,
                         {"num_experts_per_tok = 9", "8"}));
}

TEST(ModelConfig, ReadsTheVariantsOfDeepseekV3) {
  const auto config = parse(with(with(with(kDeepseek, "n_shared_experts", "3"), "moe_layer_freq", "2"),
                                 "num_nextn_predict_layers", "1"));
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->shared_intermediate_size, 3 * 128);
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{false, false, true, false}));
  EXPECT_EQ(config->num_mtp_layers, 1);
  const auto greedy =
      parse(with(with(with(kDeepseek, "topk_method", R"("greedy")"), "n_group", "1"), "topk_group", "1"));
  ASSERT_TRUE(is_ok(greedy));
  EXPECT_FALSE(greedy->router.has_correction_bias);
  EXPECT_TRUE(fails_with(parse(with(kDeepseek, "topk_method", R"("greedy")")), StatusCode::kInvalidArgument,
                         {"topk_method = 'greedy'", "noaux_tc"}));
  const auto whole = parse(with(without(kDeepseek, "q_lora_rank"), "n_shared_experts", "0"));
  ASSERT_TRUE(is_ok(whole));
  EXPECT_EQ(whole->mla.q_lora_rank, 0);
  EXPECT_EQ(whole->shared_intermediate_size, 0);
  const auto yarn = parse(with(kDeepseek, "rope_scaling",
                               R"({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0})"));
  ASSERT_TRUE(is_ok(yarn));
  EXPECT_EQ(yarn->rope.mscale, 1.0);
  EXPECT_FALSE(yarn->rope.mscale_all_dim.has_value());
}

TEST(ModelConfig, ReadsQwen3Moe) {
  const auto config = parse(with(kQwen, "mlp_only_layers", "[2]"), "", kNvfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kQwen3Moe);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->rope.theta, 1000000);
  EXPECT_EQ(config->layer_has_experts, (std::vector<bool>{true, true, false, true}));
  EXPECT_EQ(config->layer_windows, (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_TRUE(config->qk_norm);
  EXPECT_TRUE(config->router.norm_top_k);
  EXPECT_FALSE(config->attention_bias);
  EXPECT_EQ(config->num_shared_experts, 0);
  EXPECT_EQ(config->dense_intermediate_size, 512);
  const auto defaults = parse(without(kQwen, "norm_topk_prob"), "", kNvfp4);
  ASSERT_TRUE(is_ok(defaults));
  EXPECT_FALSE(defaults->router.norm_top_k);
  const auto every_second = parse(with(kQwen, "decoder_sparse_step", "2"), "", kNvfp4);
  ASSERT_TRUE(is_ok(every_second));
  EXPECT_EQ(every_second->layer_has_experts, (std::vector<bool>{false, true, false, true}));
  const auto renamed = parse(without(kQwen, "num_experts") + R"(, "num_local_experts": 8)", "", kNvfp4);
  ASSERT_TRUE(is_ok(renamed));
  EXPECT_EQ(renamed->num_experts, 8);
}

TEST(ModelConfig, ReadsQwen2Moe) {
  const auto config = parse(without(kQwen2, "norm_topk_prob"), "", kNvfp4);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->family, ModelFamily::kQwen2Moe);
  EXPECT_FALSE(config->qk_norm);
  EXPECT_FALSE(config->router.norm_top_k);
  EXPECT_TRUE(config->attention_bias);
  EXPECT_TRUE(config->shared_expert_gate);
  EXPECT_EQ(config->num_shared_experts, 1);
  EXPECT_EQ(config->shared_intermediate_size, 192);
  const auto no_bias = parse(with(kQwen2, "qkv_bias", "false"), "", kNvfp4);
  ASSERT_TRUE(is_ok(no_bias));
  EXPECT_FALSE(no_bias->attention_bias);
  EXPECT_TRUE(fails_with(parse(without(kQwen2, "shared_expert_intermediate_size")),
                         StatusCode::kInvalidArgument, {"shared_expert_intermediate_size is missing"}));
}

TEST(ModelConfig, QwenSlidingWindowsFollowTheStockClasses) {
  const auto windows = [](const std::string& keys) {
    const auto config = parse(keys, "", kNvfp4);
    EXPECT_TRUE(is_ok(config));
    return config.ok() ? config->layer_windows : std::vector<int64_t>{};
  };
  const auto sliding = [](const std::string& keys) {
    return with(with(keys, "use_sliding_window", "true"), "sliding_window", "64");
  };
  using Windows = std::vector<int64_t>;
  EXPECT_EQ(windows(with(kQwen, "sliding_window", "64")), (Windows{0, 0, 0, 0}));
  EXPECT_EQ(windows(sliding(kQwen)), (Windows{64, 64, 64, 64}));
  EXPECT_EQ(windows(with(kQwen, "use_sliding_window", "true")), (Windows{4096, 4096, 4096, 4096}));
  EXPECT_EQ(windows(sliding(kQwen2)), (Windows{64, 0, 64, 0}));
  EXPECT_EQ(windows(with(sliding(kQwen2), "max_window_layers", "2")), (Windows{64, 0, 0, 0}));
  const std::string types =
      R"(["full_attention", "sliding_attention", "sliding_attention", "full_attention"])";
  EXPECT_EQ(windows(with(sliding(kQwen2), "layer_types", types)), (Windows{0, 64, 64, 0}));
  EXPECT_TRUE(fails_with(parse(with(sliding(kQwen2), "layer_types", R"(["full_attention"])")),
                         StatusCode::kInvalidArgument, {"layer_types has 1", "num_hidden_layers = 4"}));
}

TEST(ModelConfig, NamesUnsupportedArchitectures) {
  const auto named = [](const char* architecture, const char* type) {
    return parse(with(with(kGptOss, "architectures", std::string("[\"") + architecture + "\"]"), "model_type",
                      std::string("\"") + type + "\""));
  };
  EXPECT_TRUE(fails_with(named("LlamaForCausalLM", "llama"), StatusCode::kUnsupported,
                         {"LlamaForCausalLM", "llama", "gpt_oss", "deepseek_v3", "qwen3_moe"}));
  EXPECT_TRUE(fails_with(named("GptOssForSequenceClassification", "gpt_oss"), StatusCode::kUnsupported,
                         {"GptOssForSequenceClassification"}));
  EXPECT_TRUE(fails_with(parse_model_config("{}", "", ""), StatusCode::kUnsupported, {"gpt_oss"}));
}

TEST(ModelConfig, NamesUnsupportedQuantization) {
  const auto quant = [](const std::string& keys, const char* value) {
    return parse(with(keys, "quantization_config", value));
  };
  for (const char* method : {"quark", "fp8", "awq"})
    EXPECT_TRUE(fails_with(quant(kQwen, (std::string(R"({"quant_method": ")") + method + "\"}").c_str()),
                           StatusCode::kUnsupported, {method, "mxfp4", "NVFP4"}));
  EXPECT_TRUE(fails_with(quant(kQwen, R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})"),
                         StatusCode::kUnsupported, {"MIXED_PRECISION"}));
  EXPECT_TRUE(
      fails_with(quant(kQwen, R"({"quant_method": "mxfp4"})"), StatusCode::kUnsupported, {"qwen3_moe"}));
  EXPECT_TRUE(
      fails_with(parse(kGptOss, "", kNvfp4), StatusCode::kUnsupported, {"gpt_oss", "hf_quant_config.json"}));
}

TEST(ModelConfig, ReadsTheFlatModelOptDeclaration) {
  const auto flat = [](const std::string& rest, const std::string& hf = "") {
    return parse(kQwen + R"(, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", )" +
                     rest + "}",
                 "", hf);
  };
  const std::string groups =
      R"("config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}})";
  const auto config = flat(R"("ignore": ["lm_head", "model.layers.0*"], )" + groups);
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->quant.method, QuantMethod::kModelOptNvfp4);
  EXPECT_EQ(config->quant.exclude_modules.all().size(), 2u);
  EXPECT_TRUE(is_ok(flat(groups, kNvfp4)));
  EXPECT_TRUE(
      fails_with(flat(R"("group_size": 32)"), StatusCode::kInvalidArgument, {"group_size = 32", "16"}));
  EXPECT_TRUE(fails_with(flat(R"("group_size": 32, )" + groups), StatusCode::kInvalidArgument, {"32", "16"}));
  EXPECT_TRUE(
      fails_with(parse(kGptOss + kMxfp4, "", kNvfp4), StatusCode::kInvalidArgument, {"different methods"}));
}

// Each row: key, value, and another text that the message must contain.
TEST(ModelConfig, RefusesValuesOutOfRange) {
  struct Row {
    const char *key, *value, *named;
  };
  for (const Row& row : {Row{"num_local_experts", "0", "from 1 to 4096"},
                         Row{"num_local_experts", "3", "num_experts_per_tok = 4"},
                         Row{"num_local_experts", "-1", "from 1"},
                         Row{"num_experts_per_tok", "0", "from 1"},
                         Row{"num_experts_per_tok", "17", "num_local_experts = 16"},
                         Row{"hidden_size", "250", "multiples of 32"},
                         Row{"hidden_size", "0", "from 1"},
                         Row{"hidden_size", "\"256\"", "whole numbers"},
                         Row{"hidden_size", "256.5", "whole numbers"},
                         Row{"hidden_size", "9223372036854775807", "from 1 to 262144"},
                         Row{"hidden_size", "18446744073709551615", "from 1"},
                         Row{"hidden_size", "1e300", "from 1"},
                         Row{"intermediate_size", "144", "multiples of 32"},
                         Row{"num_hidden_layers", "1025", "from 1 to 1024"},
                         Row{"vocab_size", "4294967296", "from 1"},
                         Row{"num_attention_heads", "3", "num_key_value_heads = 2"},
                         Row{"num_key_value_heads", "0", "from 1"},
                         Row{"head_dim", "63", "even"},
                         Row{"head_dim", "4096", "from 2"},
                         Row{"rms_norm_eps", "0", "numbers from"},
                         Row{"rms_norm_eps", "-1e-5", "numbers from"},
                         Row{"rms_norm_eps", "\"NaN\"", "numbers from"},
                         Row{"eos_token_id", "1024", "from 0 to 1023"},
                         Row{"eos_token_id", "[0, -1]", "-1"},
                         Row{"sliding_window", "0", "from 1"},
                         Row{"swiglu_limit", "-7", "numbers"},
                         Row{"hidden_act", "\"gelu\"", "silu"},
                         Row{"torch_dtype", "\"int8\"", "bfloat16"},
                         Row{"attention_bias", "1", "true, false"},
                         Row{"max_position_embeddings", "0", "from 1"}})
    EXPECT_TRUE(fails_with(parse(with(kGptOss + kMxfp4, row.key, row.value)), StatusCode::kInvalidArgument,
                           {row.key, row.named}))
        << row.key << " = " << row.value;
}

TEST(ModelConfig, RefusesMissingKeys) {
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok",
        "max_position_embeddings", "num_local_experts", "intermediate_size"})
    EXPECT_TRUE(fails_with(parse(without(kGptOss, key)), StatusCode::kInvalidArgument, {key, "missing"}));
}

TEST(ModelConfig, RefusesRopeThatItDoesNotApply) {
  const std::string both = with(kGptOss, "rope_scaling", R"({"type": "yarn", "factor": 4})");
  EXPECT_TRUE(
      is_ok(parse(with(both, "rope_parameters", R"({"rope_type": "yarn", "factor": 4, "rope_theta": 9})"))));
  EXPECT_TRUE(fails_with(parse(with(both, "rope_parameters", R"({"rope_type": "yarn", "factor": 8})")),
                         StatusCode::kInvalidArgument, {"rope_parameters", "rope_scaling", "differ"}));
  EXPECT_TRUE(fails_with(parse(with(kQwen, "partial_rotary_factor", "0.5")), StatusCode::kUnsupported,
                         {"partial_rotary_factor = 0.5", "1"}));
  EXPECT_TRUE(fails_with(
      parse(with(kGptOss, "rope_parameters", R"({"rope_type": "default", "partial_rotary_factor": 0.25})")),
      StatusCode::kUnsupported, {"rope_parameters", "partial_rotary_factor = 0.25"}));
}

TEST(ModelConfig, TheLargestLegalSizesDoNotOverflow) {
  const double h = 1 << 18, experts = 1 << 12, layers = 1 << 10, heads = 1 << 10, head_dim = 1 << 10;
  EXPECT_LT(experts * 2 * h * h * layers, 0x1p63);
  EXPECT_LT(layers * 0x1p27 * heads * head_dim * 2 * 4, 0x1p63);
  EXPECT_TRUE(is_ok(parse(with(with(kGptOss, "hidden_size", "262144"), "intermediate_size", "262144"))));
  EXPECT_TRUE(
      fails_with(parse(with(kGptOss, "hidden_size", "262176")), StatusCode::kInvalidArgument, {"262144"}));
}

TEST(ModelConfig, RefusesWhatIsNoJson) {
  EXPECT_TRUE(fails_with(parse_model_config("", "", ""), StatusCode::kDataLoss, {"config.json", "JSON"}));
  EXPECT_TRUE(
      fails_with(parse_model_config("[]", "", ""), StatusCode::kInvalidArgument, {"not a JSON object"}));
  EXPECT_TRUE(
      fails_with(parse(with(kGptOss, "rms_norm_eps", "NaN")), StatusCode::kDataLoss, {"config.json"}));
  EXPECT_TRUE(fails_with(parse(kGptOss, "{"), StatusCode::kDataLoss, {"generation_config.json"}));
  EXPECT_TRUE(fails_with(parse(kGptOss, "", "{"), StatusCode::kDataLoss, {"hf_quant_config.json"}));
  EXPECT_TRUE(
      fails_with(parse(kGptOss + ", \"head_dim\": 64"), StatusCode::kDataLoss, {"'head_dim' appears twice"}));
}

TEST(ModelConfig, GenerationConfigWins) {
  const auto config = parse(kGptOss, R"({"eos_token_id": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
                                         "min_p": 0.25, "repetition_penalty": 1.05})");
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->eos_token_ids, std::vector<int32_t>{7});
  EXPECT_EQ(config->default_sampling.temperature, 0.5f);
  EXPECT_EQ(config->default_sampling.top_p, 0.9f);
  EXPECT_EQ(config->default_sampling.top_k, 40);
  EXPECT_EQ(config->default_sampling.min_p, 0.25f);
  EXPECT_EQ(config->default_sampling.repetition_penalty, 1.05f);
  const auto greedy = parse(kGptOss, R"({"do_sample": false, "temperature": 0.5})");
  ASSERT_TRUE(is_ok(greedy));
  EXPECT_EQ(greedy->default_sampling.temperature, 0);
  EXPECT_EQ(greedy->eos_token_ids, (std::vector<int32_t>{0, 2}));
  EXPECT_TRUE(fails_with(parse(kGptOss, R"({"top_p": 0})"), StatusCode::kInvalidArgument,
                         {"generation_config.json", "top_p = 0"}));
}

}  // namespace
}  // namespace fp4moe
