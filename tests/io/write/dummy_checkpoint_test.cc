#include "io/write/dummy_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "io/checkpoint/expert_weights.h"
#include "io/file.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny.h"
#include "io/write/make_tiny_files.h"

namespace fp4moe {
namespace {

ModelConfig config_of(const MakeTinyOptions& options) {
  const MakeTinyFiles files = make_tiny_files(options).value();
  const auto text = [](const Json& json) { return json.is_null() ? std::string() : json.dump(); };
  return parse_model_config(text(files.config), text(files.generation), text(files.hf_quant)).value();
}

class EveryShape : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(DummyCheckpoint, EveryShape, testing::ValuesIn(make_tiny_shapes()),
                         [](const testing::TestParamInfo<std::string>& param) {
                           std::string name = param.param;
                           for (char& c : name) c = c == '-' || c == '.' ? '_' : c;
                           return name;
                         });

// Full size works even if this machine has less memory: 60 GB for gpt-oss-120b, 340 GB for DeepSeek.
TEST_P(EveryShape, LoadsItsFirstAndLastExpertsAtFullSize) {
  const ModelConfig config = config_of({.like = GetParam()});
  const auto checkpoint = dummy_checkpoint(config, "folder");
  ASSERT_TRUE(is_ok(checkpoint));
  const int64_t layer = config.num_layers - 1;
  const auto moe = load_expert_weights(*checkpoint, config, layer, {0, 1});
  ASSERT_TRUE(is_ok(moe));
  ASSERT_EQ(static_cast<int64_t>(moe->experts.size()), config.num_experts);
  std::vector<float> row(static_cast<size_t>(config.hidden_size));
  for (const int64_t r : {int64_t{0}, config.intermediate_size - 1}) {
    fp4_dequantize_row(moe->experts.back().up, r, row.data());
    double sum = 0;
    for (const float w : row) sum += static_cast<double>(w) * w;
    const double deviation = std::sqrt(sum / static_cast<double>(config.hidden_size));
    EXPECT_GT(deviation, 0.005);
    EXPECT_LT(deviation, 0.2);
  }
}

TEST_P(EveryShape, HasTheTensorsThatMakeTinyWrites) {
  MakeTinyOptions options{.like = GetParam()};
  options.num_hidden_layers = 4;
  options.hidden_size = 128;
  options.intermediate_size = 64;
  options.vocab_size = 300;
  const TempFolder folder;
  ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
  const auto written = Checkpoint::open(folder.path());
  ASSERT_TRUE(is_ok(written));
  const auto config = load_model_config(folder.path());
  ASSERT_TRUE(is_ok(config));
  const auto dummy = open_weights(folder.path(), "dummy", *config);
  ASSERT_TRUE(is_ok(dummy));
  EXPECT_EQ(dummy->total_bytes(), written->total_bytes());
  ASSERT_EQ(dummy->tensors().size(), written->tensors().size());
  for (const TensorEntry& tensor : written->tensors())
    EXPECT_TRUE(is_ok(dummy->get(tensor.name, tensor.view.dtype, tensor.view.shape))) << tensor.name;
}

TEST(DummyCheckpoint, TensorsOfOneKindDifferAndStayTheSameFromStartToStart) {
  const ModelConfig config = config_of({.like = "gpt-oss-20b"});
  const auto first = dummy_checkpoint(config, "folder"), second = dummy_checkpoint(config, "folder");
  ASSERT_TRUE(is_ok(first));
  ASSERT_TRUE(is_ok(second));
  std::set<std::vector<uint8_t>> beginnings;
  for (int layer = 0; layer < 24; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer) + ".mlp.experts.gate_up_proj_blocks";
    const TensorView a = first->find(name)->view, b = second->find(name)->view;
    EXPECT_TRUE(std::equal(a.data, a.data + 4096, b.data));
    beginnings.insert({a.data, a.data + 64});
  }
  EXPECT_EQ(beginnings.size(), 24u);
}

// A declaration that names single modules, as NVIDIA's exports of Qwen3.6 do.
TEST(DummyCheckpoint, DenseMatricesHaveTheDeclaredFormat) {
  const MakeTinyFiles files = make_tiny_files({.like = "qwen3.5-moe-tiny"}).value();
  const auto config = parse_model_config(
      files.config.dump(), "", R"({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
        "model.language_model.layers.0.linear_attn.in_proj_z": {"quant_algo": "FP8"}}}})");
  ASSERT_TRUE(is_ok(config));
  const auto checkpoint = dummy_checkpoint(*config, "folder");
  ASSERT_TRUE(is_ok(checkpoint));
  const int64_t h = config->hidden_size;
  const auto head = load_linear_weights(*checkpoint, *config, "lm_head", config->vocab_size, h);
  ASSERT_TRUE(is_ok(head));
  EXPECT_TRUE(head->is_fp4);
  const std::string projections = "model.layers.0.linear_attn.in_proj_";
  const int64_t values = config->delta.num_value_heads * config->delta.value_head_dim;
  const auto z = load_linear_weights(*checkpoint, *config, projections + "z", values, h);
  ASSERT_TRUE(is_ok(z));
  EXPECT_TRUE(z->is_fp8());
  const auto b =
      load_linear_weights(*checkpoint, *config, projections + "b", config->delta.num_value_heads, h);
  ASSERT_TRUE(is_ok(b));
  EXPECT_NE(b->weight, nullptr);
}

TEST(DummyCheckpoint, ReleasedPagesComeBack) {
  const ModelConfig config = config_of({.like = "gpt-oss-20b"});
  const auto checkpoint = dummy_checkpoint(config, "folder");
  ASSERT_TRUE(is_ok(checkpoint));
  const TensorView view = checkpoint->find("model.embed_tokens.weight")->view;
  const std::vector<uint8_t> before(view.data, view.data + 65536);
  checkpoint->release(view);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), view.data));
}

TEST(DummyCheckpoint, ATokenizerIsMadeWhereThereIsNone) {
  const TempFolder folder;
  EXPECT_FALSE(open_tokenizer(folder.path(), "auto").ok());
  const auto tokenizer = open_tokenizer(folder.path(), "dummy");
  ASSERT_TRUE(is_ok(tokenizer));
  const auto ids = tokenizer->encode("two words", false);
  ASSERT_TRUE(is_ok(ids));
  EXPECT_EQ(tokenizer->decode(*ids, false), "two words");
  ASSERT_TRUE(is_ok(write_text_file(folder.path() + "/tokenizer.json", "{")));
  EXPECT_FALSE(open_tokenizer(folder.path(), "dummy").ok());  // an existing file must be valid
}

}  // namespace
}  // namespace fp4moe
