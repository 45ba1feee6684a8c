#include "io/config/quant_config.h"

#include <gtest/gtest.h>

#include <random>

#include <string>

#include "io/checkpoint/mtp_layers.h"
#include "io/checkpoint/safetensors.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

Result<QuantConfig> parse_flat(const std::string& declaration) {
  const auto config = parse_json(R"({"quantization_config": )" + declaration + "}", "config.json");
  EXPECT_TRUE(is_ok(config)) << declaration;
  return parse_quant_config(*config, Json());
}

Result<QuantConfig> parse_hf(const std::string& quantization) {
  const auto hf = parse_json(R"({"quantization": )" + quantization + "}", "hf_quant_config.json");
  EXPECT_TRUE(is_ok(hf)) << quantization;
  return parse_quant_config(Json::object(), *hf);
}

bool excluded_by(const char* pattern, const char* module) {
  QuantConfig quant;
  quant.method = QuantMethod::kModelOptNvfp4;
  quant.exclude_modules = {pattern};
  return is_excluded(quant, module);
}

TEST(Exclusion, FollowsThePatternsOfEveryDialect) {
  struct Case {
    const char *pattern, *module;
    bool excluded;
  };
  constexpr Case kCases[] = {
      // The module itself or a parent, never a longer name.
      {"model.layers.0.mlp.gate", "model.layers.0.mlp.gate", true},
      {"model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", false},
      {"model.layers.0.self_attn", "model.layers.0.self_attn.q_proj", true},
      {"model.layers.1", "model.layers.10.mlp.up_proj", false},
      // Globs cross dots.
      {"model.layers.*.self_attn*", "model.layers.17.self_attn.kv_b_proj", true},
      {"model.layers.1*", "model.layers.10.mlp.up_proj", true},
      {"*", "model.layers.0.mlp.up_proj", true},
      {"*.mlp.gate", "model.layers.3.mlp.gate", true},
      {"*.mlp.gate", "model.layers.3.mlp.gate_proj", false},
      {"*self_attn*", "model.layers.3.mlp.up_proj", false},
      {"model.layers.?.mlp*", "model.layers.3.mlp.down_proj", true},
      {"model.layers.?.mlp*", "model.layers.13.mlp.down_proj", false},
      // A pattern is not a regular expression: a dot matches only a dot.
      {"model.layers.0.mlp.up.proj", "model.layers.0.mlp.up_proj", false},
      // A pattern without a dot matches any component.
      {"lm_head", "lm_head", true},
      {"self_attn", "model.layers.3.self_attn.o_proj", true},
      {"gate", "model.layers.3.mlp.gate", true},
      {"gate", "model.layers.3.mlp.gate_proj", false},
      {"q_*", "model.layers.3.self_attn.q_proj", true},
      // Prefixes of multimodal checkpoints.
      {"language_model.model.layers.0*", "model.layers.0.mlp.up_proj", true},
      {"model.language_model.layers.0*", "model.layers.0.mlp.up_proj", true},
      {"model.layers.0*", "language_model.model.layers.0.mlp.up_proj", true},
      // Parts of fused modules.
      {"model.layers.3.self_attn.kv_a_proj_with_mqa", "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa",
       true},
      {"model.layers.*.self_attn.q_b_proj", "model.layers.3.self_attn.fused_q_b_proj", true},
      {"model.layers.4.self_attn.kv_b_proj", "model.layers.3.self_attn.fused_kv_b_proj", false},
      {"model.layers.3.self_attn.o_proj", "model.layers.3.self_attn.fused_o_proj", false},
      // Regular expressions are anchored at the start only.
      {"re:.*mlp.gate$", "model.layers.3.mlp.gate", true},
      {"re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", false},
      {"re:.*self_attn", "model.layers.3.self_attn.q_proj", true},
      {"re:self_attn", "model.layers.3.self_attn.q_proj", false},
      {"re:model|lm_head", "lm_head", true},
      {"re:language_model.*", "language_model.model.layers.0.mlp.up_proj", true},
      {"", "lm_head", false},
  };
  for (const Case& c : kCases)
    EXPECT_EQ(excluded_by(c.pattern, c.module), c.excluded) << c.pattern << " on " << c.module;
}

TEST(Exclusion, OfAnUnquantisedCheckpointIsTotal) { EXPECT_TRUE(is_excluded(QuantConfig{}, "lm_head")); }

TEST(Exclusion, InclusionLeavesTheRestAlone) {
  QuantConfig quant;
  quant.method = QuantMethod::kModelOptNvfp4;
  quant.include_modules = {"*.mlp.experts"};
  quant.exclude_modules = {"model.layers.1*"};
  EXPECT_FALSE(is_excluded(quant, "model.layers.0.mlp.experts.3.up_proj"));
  EXPECT_TRUE(is_excluded(quant, "model.layers.0.mlp.shared_experts.up_proj"));
  EXPECT_TRUE(is_excluded(quant, "model.layers.1.mlp.experts.3.up_proj"));
}

// Patterns of a multimodal checkpoint may name modules as stored, also those in FP8.
TEST(Fp8, StoredNamesOfMultimodalCheckpointsMatch) {
  QuantConfig quant;
  quant.method = QuantMethod::kModelOptNvfp4;
  quant.text_prefix = "model.language_model.";
  quant.include_modules = {"*.mlp.experts"};
  quant.fp8_modules = {"re:model\\.language_model\\.layers\\.0\\..*q_proj",
                       "model.language_model.layers.1.self_attn"};
  EXPECT_TRUE(is_declared_fp8(quant, "model.layers.0.self_attn.q_proj"));
  EXPECT_TRUE(is_declared_fp8(quant, "model.layers.1.self_attn.k_proj"));
  EXPECT_FALSE(is_declared_fp8(quant, "model.layers.2.self_attn.q_proj"));
  quant.exclude_modules = {"re:model\\.language_model\\.layers\\.0"};
  EXPECT_FALSE(is_declared_fp8(quant, "model.layers.0.self_attn.q_proj"));
}

// Full names are looked up; the answer is that of matching the patterns one by one.
TEST(ModulePatterns, AreMatchedAsOneByOne) {
  const std::vector<std::string> parts = {"model",    "language_model",
                                          "layers",   "0",
                                          "1",        "mlp",
                                          "experts",  "self_attn",
                                          "q_a_proj", "fused_qkv_a_proj_with_mqa",
                                          "up_proj",  "*",
                                          "?"};
  std::mt19937 random(7);
  const auto draw = [&](size_t num_kinds) {
    std::string name = parts[random() % num_kinds];
    for (size_t n = random() % 6; n > 0; --n) name += "." + parts[random() % num_kinds];
    return name;
  };
  int num_named = 0;
  for (int round = 0; round < 3000; ++round) {
    ModulePatterns patterns;
    for (int i = 0; i < 3; ++i) patterns.push_back(draw(round % 2 == 0 ? parts.size() : parts.size() - 2));
    if (round % 7 == 0) patterns.push_back("re:model\\.layers\\.0.*up_proj");
    const std::string module = draw(parts.size() - 2);
    const bool expected = std::ranges::any_of(
        patterns.all(), [&](const std::string& pattern) { return names_module(pattern, module); });
    EXPECT_EQ(patterns.name(module), expected) << module << " by " << testing::PrintToString(patterns.all());
    num_named += expected;
  }
  EXPECT_GT(num_named, 300);
  EXPECT_LT(num_named, 2700);
}

TEST(ModelOpt, BothSpellingsOfTheExclusionsAreRead) {
  const auto quant =
      parse_flat(R"({"quant_algo": "NVFP4", "ignore": ["lm_head"], "exclude_modules": ["a.b*"]})");
  ASSERT_TRUE(is_ok(quant));
  EXPECT_TRUE(is_excluded(*quant, "lm_head"));
  EXPECT_TRUE(is_excluded(*quant, "a.b.c"));
  EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.up_proj"));
}

TEST(ModelOpt, MixedPrecisionTakesItsFp4ModulesFromTheMap) {
  const auto quant = parse_hf(R"({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
    "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.mlp.shared_experts": {"quant_algo": "W4A16_NVFP4"},
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}})");
  ASSERT_TRUE(is_ok(quant));
  EXPECT_EQ(quant->method, QuantMethod::kModelOptNvfp4);
  EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.experts.0.up_proj"));
  EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.shared_experts.up_proj"));
  EXPECT_TRUE(is_excluded(*quant, "model.layers.0.mlp.experts.1.up_proj"));
  EXPECT_TRUE(is_declared_fp8(*quant, "model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(is_declared_fp8(*quant, "model.layers.0.self_attn.k_proj"));
  EXPECT_FALSE(is_declared_fp8(*quant, "model.layers.0.mlp.experts.0.up_proj"));
  EXPECT_TRUE(quant->other_modules.empty());
  const auto other = parse_hf(R"({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
    "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "W4A8_AWQ"}}})");
  ASSERT_TRUE(is_ok(other));
  ASSERT_EQ(other->other_modules.size(), 1u);
  EXPECT_EQ(other->other_modules[0].pattern, "lm_head");
  EXPECT_EQ(other->other_modules[0].algorithm, "W4A8_AWQ");
  EXPECT_TRUE(fails_with(parse_hf(R"({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
    "a.b": {"quant_algo": "NVFP4", "group_size": 32}}})"),
                         StatusCode::kInvalidArgument, {"quantized_layers.a.b", "group_size = 32", "16"}));
  EXPECT_TRUE(fails_with(
      parse_hf(R"({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "FP8"}}})"),
      StatusCode::kUnsupported, {"MIXED_PRECISION", "quantized_layers"}));
}

TEST(ModelOpt, MixedPrecisionMayNameTheExpertsAlone) {
  const auto quant =
      parse_hf(R"({"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16})");
  ASSERT_TRUE(is_ok(quant));
  EXPECT_FALSE(is_excluded(*quant, "model.layers.7.mlp.experts.0.up_proj"));
  EXPECT_TRUE(is_excluded(*quant, "model.layers.7.self_attn.q_proj"));
}

TEST(ModelOpt, OtherAlgorithmsAreRefused) {
  for (const char* algorithm : {"FP8", "NVFP4_AWQ", "W4A8_AWQ"})
    EXPECT_TRUE(fails_with(parse_hf(std::string(R"({"quant_algo": ")") + algorithm + "\"}"),
                           StatusCode::kUnsupported, {algorithm, "NVFP4", "compressed-tensors"}));
}

TEST(KvCache, DeclarationsAreRead) {
  for (const char* text :
       {R"({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"})",
        R"({"quant_algo": "NVFP4", "kv_cache_scheme": "FP8"})",
        R"({"quant_algo": "NVFP4", "kv_cache_scheme": {"type": "float", "num_bits": 8}})"}) {
    const auto quant = parse_hf(text);
    ASSERT_TRUE(is_ok(quant));
    EXPECT_EQ(quant->kv_cache_type, "FP8") << text;
  }
  const auto none = parse_hf(R"({"quant_algo": "NVFP4", "kv_cache_quant_algo": null})");
  ASSERT_TRUE(is_ok(none));
  EXPECT_EQ(none->kv_cache_type, "");
}

std::string compressed(const std::string& format, const std::string& groups, const std::string& rest = "") {
  return R"({"quant_method": "compressed-tensors", "format": ")" + format + R"(", "config_groups": {)" +
         groups + "}" + rest + "}";
}
std::string group(const std::string& targets, int num_bits, int group_size) {
  return R"("group_)" + std::to_string(num_bits) + R"(": {"targets": [)" + targets +
         R"(], "weights": {"num_bits": )" + std::to_string(num_bits) +
         R"(, "type": "float", "group_size": )" + std::to_string(group_size) + "}}";
}

TEST(CompressedTensors, DeclaresNvfp4AndMxfp4) {
  const auto nvfp4 = parse_flat(compressed("nvfp4-pack-quantized", group("\"Linear\"", 4, 16),
                                           R"(, "ignore": ["lm_head", "re:.*mlp.gate$"])"));
  ASSERT_TRUE(is_ok(nvfp4));
  EXPECT_EQ(nvfp4->method, QuantMethod::kCompressedNvfp4);
  EXPECT_EQ(nvfp4->group_size, 16);
  EXPECT_FALSE(is_excluded(*nvfp4, "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(is_excluded(*nvfp4, "model.layers.0.mlp.gate"));
  const auto mxfp4 = parse_flat(compressed("mxfp4-pack-quantized", group("\"re:.*experts.*\"", 4, 32)));
  ASSERT_TRUE(is_ok(mxfp4));
  EXPECT_EQ(mxfp4->method, QuantMethod::kCompressedMxfp4);
  EXPECT_EQ(mxfp4->group_size, 32);
  EXPECT_FALSE(is_excluded(*mxfp4, "model.layers.0.mlp.experts.0.up_proj"));
  EXPECT_TRUE(is_excluded(*mxfp4, "model.layers.0.self_attn.q_proj"));
}

TEST(CompressedTensors, RefusesWhatItDoesNotRun) {
  EXPECT_TRUE(fails_with(parse_flat(compressed("nvfp4-pack-quantized", group("\"Linear\"", 4, 32))),
                         StatusCode::kInvalidArgument, {"group_size = 32", "NVFP4: 16"}));
  EXPECT_TRUE(fails_with(parse_flat(compressed("mxfp4-pack-quantized", group("\"Linear\"", 4, 16))),
                         StatusCode::kInvalidArgument, {"group_size = 16", "MXFP4: 32"}));
  EXPECT_TRUE(fails_with(parse_flat(compressed("float-quantized", group("\"Linear\"", 8, 128))),
                         StatusCode::kUnsupported, {"float-quantized", "nvfp4-pack-quantized"}));
  EXPECT_TRUE(fails_with(parse_flat(compressed("nvfp4-pack-quantized", group("\"re:(\"", 4, 16))),
                         StatusCode::kInvalidArgument, {"targets", "does not compile"}));
  EXPECT_TRUE(fails_with(parse_flat(R"({"quant_method": "compressed-tensors"})"),
                         StatusCode::kInvalidArgument, {"config_groups is missing"}));
  const auto mixed = parse_flat(compressed(
      "nvfp4-pack-quantized", group("\"re:.*experts.*\"", 4, 16) + ", " + group("\"re:.*attn.*\"", 8, 128)));
  ASSERT_TRUE(is_ok(mixed));
  EXPECT_TRUE(mixed->other_modules.empty());
  EXPECT_TRUE(is_declared_fp8(*mixed, "model.layers.0.attn.q_proj"));
  std::string integers = group("\"re:.*attn.*\"", 8, 128);
  integers.replace(integers.find("float"), 5, "int");
  const auto other =
      parse_flat(compressed("nvfp4-pack-quantized", group("\"re:.*experts.*\"", 4, 16) + ", " + integers));
  ASSERT_TRUE(is_ok(other));
  ASSERT_EQ(other->other_modules.size(), 1u);
  EXPECT_EQ(other->other_modules[0].algorithm, "8-bit int");
}

// Groups that name their formats; FP4 for all linear layers leaves the others to the FP8 group.
TEST(CompressedTensors, GroupsMayHaveDifferentFormats) {
  const auto quant = parse_flat(R"({"quant_method": "compressed-tensors", "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {
      "group_0": {"format": "float-quantized", "targets": ["re:.*self_attn.*"],
                  "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
      "group_1": {"format": "nvfp4-pack-quantized", "targets": ["Linear"],
                  "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}})");
  ASSERT_TRUE(is_ok(quant));
  EXPECT_EQ(quant->method, QuantMethod::kCompressedNvfp4);
  EXPECT_TRUE(is_declared_fp8(*quant, "model.layers.0.self_attn.o_proj"));
  EXPECT_FALSE(is_declared_fp8(*quant, "model.layers.0.mlp.up_proj"));
  EXPECT_FALSE(is_declared_fp8(*quant, "lm_head"));
  EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.experts.0.up_proj"));
}

std::string quark(const std::string& global, const std::string& rest = "") {
  return R"({"quant_method": "quark", "global_quant_config": {"weight": )" + global + "}" + rest + "}";
}
const std::string kQuarkFp4 =
    R"({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1})";
const std::string kQuarkFp8 = R"({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": null})";

TEST(Quark, DeclaresMxfp4) {
  const auto quant =
      parse_flat(quark(kQuarkFp4, R"(, "exclude": ["lm_head", "*self_attn*"], "layer_quant_config":
    {"*.shared_experts.*": {"weight": )" +
                                      kQuarkFp8 + R"(}, "*.down_proj": {"weight": null}})"));
  ASSERT_TRUE(is_ok(quant));
  EXPECT_EQ(quant->method, QuantMethod::kQuarkMxfp4);
  EXPECT_EQ(quant->group_size, 32);
  EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.experts.0.up_proj"));
  EXPECT_TRUE(is_excluded(*quant, "model.layers.0.mlp.experts.0.down_proj"));
  EXPECT_TRUE(is_excluded(*quant, "model.layers.0.self_attn.q_proj"));
  EXPECT_TRUE(is_declared_fp8(*quant, "model.layers.0.mlp.shared_experts.up_proj"));
}

TEST(Quark, MayDeclareFp4InLayersAlone) {
  const std::string layers = R"(, "layer_quant_config": {"*mlp.experts*": {"weight": )" + kQuarkFp4 + "}}";
  for (const std::string& global : {std::string("null"), kQuarkFp8}) {
    const auto quant = parse_flat(quark(global, layers));
    ASSERT_TRUE(is_ok(quant));
    EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.experts.0.up_proj"));
    EXPECT_TRUE(is_excluded(*quant, "model.layers.0.self_attn.q_proj"));
    EXPECT_EQ(is_declared_fp8(*quant, "model.layers.0.self_attn.q_proj"), global == kQuarkFp8);
  }
}

TEST(Quark, RefusesOtherWeights) {
  std::string narrow = kQuarkFp4;
  narrow.replace(narrow.find("32"), 2, "16");
  for (const std::string& global : {kQuarkFp8, narrow, "[" + kQuarkFp4 + ", " + kQuarkFp8 + "]"})
    EXPECT_TRUE(
        fails_with(parse_flat(quark(global)), StatusCode::kUnsupported, {"quark weights of dtype", "fp"}))
        << global;
  EXPECT_TRUE(fails_with(parse_flat(quark("{}")), StatusCode::kInvalidArgument, {"dtype is missing"}));
  const auto layer = parse_flat(quark(kQuarkFp4, R"(, "layer_quant_config": {"*attn*": {"weight":
    {"dtype": "int4", "qscheme": "per_group"}}})"));
  ASSERT_TRUE(is_ok(layer));
  ASSERT_EQ(layer->other_modules.size(), 1u);
  EXPECT_EQ(layer->other_modules[0].algorithm, "int4");
}

Result<QuantConfig> parse_whole(const std::string& text) {
  const auto config = parse_json(text, "config.json");
  EXPECT_TRUE(is_ok(config)) << text;
  return parse_quant_config(*config, Json());
}

// quant_method fp8: dense layers in FP8 blocks, with MXFP4 experts (at either place) or ModelOpt's NVFP4
// ones.
TEST(Fp8, NeedsFp4Experts) {
  const std::string fp8 = R"("quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128])";
  for (const std::string& text : {R"({"expert_dtype": "fp4", "quantization_config": {)" + fp8 + "}}",
                                  R"({"quantization_config": {"expert_dtype": "fp4", )" + fp8 + "}}"}) {
    const auto quant = parse_whole(text);
    ASSERT_TRUE(is_ok(quant));
    EXPECT_EQ(quant->method, QuantMethod::kFp8Mxfp4);
    EXPECT_FALSE(is_excluded(*quant, "model.layers.0.mlp.experts.0.up_proj"));
    EXPECT_TRUE(is_excluded(*quant, "model.layers.0.mlp.shared_experts.up_proj"));
    EXPECT_TRUE(is_declared_fp8(*quant, "model.layers.0.mlp.shared_experts.up_proj"));
    EXPECT_FALSE(is_declared_fp8(*quant, "lm_head"));
  }
  const auto nvfp4 = parse_flat("{" + fp8 + R"(, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4",
    "ignore": ["*.attn.*"]})");
  ASSERT_TRUE(is_ok(nvfp4));
  EXPECT_EQ(nvfp4->method, QuantMethod::kModelOptNvfp4);
  EXPECT_FALSE(is_excluded(*nvfp4, "layers.0.ffn.experts.3.w1"));
  EXPECT_TRUE(is_excluded(*nvfp4, "layers.0.attn.wq_a"));
  EXPECT_TRUE(fails_with(parse_flat("{" + fp8 + "}"), StatusCode::kUnsupported, {"routed experts in 'fp8'"}));
  EXPECT_TRUE(fails_with(parse_flat(R"({"quant_method": "fp8", "expert_dtype": "fp4", "fmt": "e5m2"})"),
                         StatusCode::kUnsupported, {"fmt 'e5m2'"}));
  EXPECT_TRUE(fails_with(
      parse_flat(R"({"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": [1, 128]})"),
      StatusCode::kUnsupported, {"weight_block_size"}));
}

TEST(Mtp, TensorsAreToldByTheirNames) {
  ModelConfig config;
  config.num_layers = 61;
  for (const char* name : {"mtp.fc.weight", "model.mtp.norm.weight", "model.layers.61.eh_proj.weight",
                           "model.layers.62", "layers.610.x"})
    EXPECT_TRUE(is_mtp_name(config, name)) << name;
  for (const char* name : {"model.layers.60.mlp.up_proj.weight", "model.layers.6", "model.layersX.61.a",
                           "model.layers.61x.a", "model.norm.weight", "mtp_like.weight"})
    EXPECT_FALSE(is_mtp_name(config, name)) << name;
}

TEST(Mtp, WhatIsSkippedIsDescribed) {
  ModelConfig config;
  config.num_layers = 1;
  const TempFolder folder;
  ASSERT_TRUE(is_ok(write_safetensors_shards(folder.path(),
                                             {{"model.layers.0.a", DType::kU8, {4}},
                                              {"model.layers.1.eh_proj.weight", DType::kU8, {3}},
                                              {"model.layers.2.b", DType::kU8, {1}},
                                              {"mtp.c", DType::kF32, {2}}},
                                             1, [](const TensorSpec& spec, const ByteSink& sink) {
                                               return sink(std::vector<uint8_t>(
                                                   static_cast<size_t>(tensor_bytes(spec).value())));
                                             })));
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(is_ok(checkpoint));
  const std::string line = describe_skipped_mtp(config, *checkpoint);
  EXPECT_NE(line.find("2 tensors (11 bytes)"), std::string::npos) << line;
  config.num_layers = 2;
  EXPECT_NE(describe_skipped_mtp(config, *checkpoint).find("1 tensors (8 bytes)"), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
