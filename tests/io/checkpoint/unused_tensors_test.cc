#include "io/checkpoint/unused_tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/log.h"
#include "io/changed_checkpoint.h"
#include "io/small_model.h"
#include "io/small_shapes.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/dummy_checkpoint.h"

namespace fp4moe {
namespace {

// The configuration of a small model of this shape.
ModelConfig config_of(const std::string& like, const std::string& dialect = "auto") {
  const TempFolder folder;
  MakeTinyOptions options = small_model(like);
  options.dialect = dialect;
  EXPECT_TRUE(is_ok(make_tiny(folder.file("m"), options)));
  const Result<ModelConfig> config = load_model_config(folder.file("m"));
  EXPECT_TRUE(is_ok(config));
  return config.ok() ? *config : ModelConfig{};
}

std::vector<std::string> names_of(const std::vector<const TensorEntry*>& tensors) {
  std::vector<std::string> names;
  for (const TensorEntry* tensor : tensors) names.push_back(tensor->name);
  return names;
}

// Every module and layer that contains a tensor: each prefix of a name up to a dot.
std::set<std::string> modules_of(const Checkpoint& checkpoint) {
  std::set<std::string> modules;
  for (const TensorEntry& tensor : checkpoint.tensors())
    for (size_t dot = tensor.name.find('.'); dot != std::string::npos; dot = tensor.name.find('.', dot + 1))
      modules.insert(tensor.name.substr(0, dot));
  return modules;
}

class Shapes : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    config_ = config_of(GetParam().like, GetParam().dialect);
    auto checkpoint = dummy_checkpoint(config_, "m");
    ASSERT_TRUE(is_ok(checkpoint));
    source_.emplace(std::move(*checkpoint));
  }
  ModelConfig config_;
  std::optional<Checkpoint> source_;
};

TEST_P(Shapes, AllTensorsOfAModelAreUsed) {
  const UnusedTensors unused = find_unused_tensors(*source_, config_);
  EXPECT_EQ(names_of(unused.in_model), std::vector<std::string>{});
  EXPECT_EQ(names_of(unused.elsewhere), std::vector<std::string>{});
  EXPECT_TRUE(is_ok(check_unused_tensors(*source_, config_, false)));
}

// The suffixes include the tensor names of other dialects, which must not pass as another form of the module.
TEST_P(Shapes, AnExtraTensorIsFoundInEveryModule) {
  for (const char* suffix :
       {".bias", ".weight", ".weight_scale", ".weight_scale_2", ".input_scale", ".weight_packed",
        ".weight_global_scale", ".pre_quant_scale", ".lora_A.weight"}) {
    ChangedCheckpoint changed(*source_);
    std::vector<std::string> expected;
    for (const std::string& module : modules_of(*source_))
      if (source_->find(module + suffix) == nullptr) {
        changed.add(module + suffix);
        expected.push_back(module + suffix);
      }
    const Checkpoint checkpoint = changed.make();
    EXPECT_EQ(names_of(find_unused_tensors(checkpoint, config_).in_model), expected) << suffix;
  }
}

TEST_P(Shapes, AModelCutInHalfIsRefused) {
  ModelConfig half = config_;
  half.num_layers = 1;
  half.layer_windows.resize(1);
  if (!half.layer_has_experts.empty()) half.layer_has_experts.resize(1);
  EXPECT_TRUE(fails_with(check_unused_tensors(*source_, half, false), StatusCode::kUnsupported,
                         {"'model.layers.1.", "num_hidden_layers = 1", "--allow-unused-tensors"}));
}

TEST_P(Shapes, DeniedBiasesAreRefused) {
  ModelConfig biased = config_, plain = config_;
  biased.attention_bias = true;
  plain.attention_bias = false;
  const auto checkpoint = dummy_checkpoint(biased, "m");
  ASSERT_TRUE(is_ok(checkpoint));
  EXPECT_TRUE(is_ok(check_unused_tensors(*checkpoint, biased, false)));
  const char* key = config_.family == ModelFamily::kQwen2Moe ? "qkv_bias = false" : "attention_bias = false";
  EXPECT_TRUE(fails_with(check_unused_tensors(*checkpoint, plain, false), StatusCode::kUnsupported,
                         {"_proj", ".bias'", key}));
}

TEST_P(Shapes, FewerExpertsThanTheFileHasAreRefused) {
  if (config_.family == ModelFamily::kGptOss)
    GTEST_SKIP() << "gpt-oss tensor shapes determine the number of experts";
  ModelConfig fewer = config_;
  --fewer.num_experts;
  EXPECT_TRUE(fails_with(check_unused_tensors(*source_, fewer, false), StatusCode::kUnsupported,
                         {".mlp.experts.3.", "experts = 3"}));
}

TEST_P(Shapes, KnownTensorsAreSilent) {
  ChangedCheckpoint changed(*source_);
  for (const char* name :
       {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
        "model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_proj.v_scale",
        "model.layers.0.self_attn.k_scale", "mtp.fc.weight", "model.mtp.layers.0.x"})
    changed.add(name);
  const Checkpoint checkpoint = changed.make();
  const UnusedTensors unused = find_unused_tensors(checkpoint, config_);
  EXPECT_TRUE(unused.in_model.empty() && unused.elsewhere.empty());
  changed.add("model.layers.0.mlp.k_scale");  // not a KV cache scale
  EXPECT_EQ(find_unused_tensors(changed.make(), config_).in_model.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(All, Shapes, all_shapes(), shape_name);

class Deepseek : public testing::Test {
 protected:
  // Returns the warnings of a check that must pass.
  std::vector<std::string> warnings_of_check(const Checkpoint& checkpoint, bool allow) {
    std::vector<std::string> warnings;
    set_log_sink([&](LogLevel level, const std::string& line) {
      if (level == LogLevel::kWarning) warnings.push_back(line);
    });
    EXPECT_TRUE(is_ok(check_unused_tensors(checkpoint, config_, allow)));
    set_log_sink({});
    return warnings;
  }

  const ModelConfig config_ = config_of("deepseek-v3-tiny");
};

// A layer after the last one is an MTP layer only if it has an MTP projection.
TEST_F(Deepseek, LayersForMultiTokenPredictionAreKnownByTheirProjection) {
  const auto source = dummy_checkpoint(config_, "m");
  ASSERT_TRUE(is_ok(source));
  ChangedCheckpoint changed(*source);
  changed.add("model.layers.2.enorm.weight");
  changed.add("model.layers.2.mlp.gate.weight");
  EXPECT_EQ(find_unused_tensors(changed.make(), config_).in_model.size(), 2u);
  changed.add("model.layers.2.eh_proj.weight");
  EXPECT_TRUE(find_unused_tensors(changed.make(), config_).in_model.empty());
}

// If drafts use the layer, only its copies of shared tensors are skipped.
TEST_F(Deepseek, ALoadedLayerForMultiTokenPredictionHasNoUnusedTensors) {
  ModelConfig config = config_;
  config.num_mtp_layers = 1;
  const auto source = dummy_checkpoint(config, "m");
  ASSERT_TRUE(is_ok(source));
  ASSERT_NE(source->find("model.layers.2.eh_proj.weight"), nullptr);
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  EXPECT_TRUE(is_ok(check_unused_tensors(*source, config, false)));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("which --speculative-algorithm EAGLE loads"), std::string::npos) << lines[0];
  lines.clear();
  EXPECT_TRUE(is_ok(check_unused_tensors(*source, config, false, /*loads_mtp=*/true)));
  EXPECT_TRUE(lines.empty());
  ChangedCheckpoint changed(*source);
  changed.add("model.layers.2.embed_tokens.weight");
  changed.add("model.layers.2.shared_head.head.weight");
  EXPECT_TRUE(is_ok(check_unused_tensors(changed.make(), config, false, true)));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("skipping 2 tensors"), std::string::npos) << lines[0];
  set_log_sink({});
  changed.add("model.layers.2.self_attn.o_proj.bias");
  EXPECT_TRUE(is_ok(check_unused_tensors(changed.make(), config, false)));
  EXPECT_TRUE(fails_with(check_unused_tensors(changed.make(), config, false, true), StatusCode::kUnsupported,
                         {"model.layers.2.self_attn.o_proj.bias"}));
}

// A vision model beside the text model is skipped with one line; in a checkpoint of a text model, a tensor
// with such a name is not known.
TEST(VisionModel, IsSkippedWithOneLine) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  for (const char* like : {"kimi-k2.5", "qwen3-vl-30b-a3b"}) {
    const ModelConfig config = config_of(like);
    const auto source = dummy_checkpoint(config, "m");
    ASSERT_TRUE(is_ok(source));
    ChangedCheckpoint changed(*source);
    for (const char* name : {"vision_tower.a", "mm_projector.b", "visual.c", "model.visual.d"})
      changed.add(name);
    const Checkpoint checkpoint = changed.make();
    const UnusedTensors unused = find_unused_tensors(checkpoint, config);
    EXPECT_TRUE(unused.in_model.empty() && unused.elsewhere.empty());
    lines.clear();
    EXPECT_TRUE(is_ok(check_unused_tensors(checkpoint, config, false)));
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_NE(lines[0].find("skipping 4 tensors"), std::string::npos) << lines[0];
    EXPECT_NE(lines[0].find("vision model"), std::string::npos) << lines[0];
    ModelConfig text_only = config;
    text_only.text_prefix.clear();
    EXPECT_FALSE(is_ok(check_unused_tensors(checkpoint, text_only, false))) << "model.visual.d is unknown";
  }
  set_log_sink({});
}

TEST_F(Deepseek, TensorsElsewhereAreCountedOnly) {
  const auto source = dummy_checkpoint(config_, "m");
  ASSERT_TRUE(is_ok(source));
  ChangedCheckpoint changed(*source);
  for (const char* name : {"vision_tower.a", "vision_tower.b", "x\ny", "optimizer.step"}) changed.add(name);
  const Checkpoint checkpoint = changed.make();
  const std::vector<std::string> warnings = warnings_of_check(checkpoint, false);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_EQ(warnings[0],
            "4 tensors of the checkpoint are not used: 'vision_tower.a', 'vision_tower.b', 'x\\ny', ...");
}

TEST_F(Deepseek, TheFlagMakesAWarningOfTheError) {
  const auto source = dummy_checkpoint(config_, "m");
  ASSERT_TRUE(is_ok(source));
  ChangedCheckpoint changed(*source);
  changed.add("model.layers.0.self_attn.o_proj.pre_quant_scale");
  const Checkpoint checkpoint = changed.make();
  EXPECT_FALSE(is_ok(check_unused_tensors(checkpoint, config_, false)));
  const std::vector<std::string> warnings = warnings_of_check(checkpoint, true);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("1 tensor of the checkpoint is not used"), std::string::npos) << warnings[0];
}

// Exporters write both tensors; the stock class uses the embedding.
TEST_F(Deepseek, ATiedHeadMayBeACopyOfTheEmbeddingOnly) {
  const auto source = dummy_checkpoint(config_, "m");
  ASSERT_TRUE(is_ok(source));
  ModelConfig tied = config_;
  tied.tie_word_embeddings = true;
  EXPECT_TRUE(fails_with(check_unused_tensors(*source, tied, false), StatusCode::kUnsupported,
                         {"'lm_head.weight'", "tie_word_embeddings = true"}));
  ChangedCheckpoint changed(*source);
  uint8_t* head = changed.writable("lm_head.weight");
  const TensorView& embedding = source->find("model.embed_tokens.weight")->view;
  std::copy_n(embedding.data, embedding.num_bytes(), head);
  EXPECT_TRUE(is_ok(check_unused_tensors(changed.make(), tied, false)));
  head[embedding.num_bytes() - 1] ^= 1;
  EXPECT_FALSE(is_ok(check_unused_tensors(changed.make(), tied, false)));
}

}  // namespace
}  // namespace fp4moe
