#include "io/write/make_tiny.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/expert_weights.h"
#include "io/checkpoint/safetensors.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/config/quant_config.h"
#include "io/file.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/tokenizer/tokenizer.h"
#include "io/write/make_tiny_files.h"
#include "io/write/make_tiny_tensors.h"

namespace fp4moe {
namespace {

std::string test_name(const testing::TestParamInfo<std::string>& param) {
  std::string name = param.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}

class EveryShape : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(MakeTiny, EveryShape, testing::ValuesIn(make_tiny_shapes()), test_name);

double published_theta(const std::string& shape) {
  if (shape.starts_with("gpt-oss")) return 150000;
  if (shape.starts_with("kimi")) return 50000;
  if (shape.starts_with("qwen3-vl")) return 5000000;
  if (shape.starts_with("qwen3-next") || shape.starts_with("qwen3.5")) return 10000000;
  return shape.starts_with("qwen") || shape.starts_with("glm") ? 1000000 : 10000;
}

bool is_published_with_yarn(const std::string& shape) {
  return shape.starts_with("gpt-oss") || shape.starts_with("kimi") || shape.starts_with("deepseek");
}

TEST_P(EveryShape, LoadsAsACheckpoint) {
  for (const char* rope : {"new", "old"}) {
    const TempFolder folder;
    MakeTinyOptions options = small_model(GetParam());
    options.rope_style = rope;
    options.num_shards = 3;
    ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
    const auto config = load_model_config(folder.path());
    ASSERT_TRUE(is_ok(config));
    EXPECT_EQ(config->hidden_size, 96);
    EXPECT_EQ(config->intermediate_size, 64);
    EXPECT_EQ(config->top_k, 2);
    EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{0, 2}));
    EXPECT_EQ(config->rope.theta, published_theta(GetParam()));
    EXPECT_EQ(config->rope.type == RopeConfig::Type::kYarn, is_published_with_yarn(GetParam()));
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(is_ok(checkpoint));
    EXPECT_TRUE(is_ok(checkpoint->get("lm_head.weight", DType::kBF16, {300, 96})));
    for (int64_t layer = 0; layer < 2; ++layer) {
      const auto moe = load_expert_weights(*checkpoint, *config, layer);
      if (!config->layer_has_experts.empty() && !config->layer_has_experts[static_cast<size_t>(layer)])
        continue;
      ASSERT_TRUE(is_ok(moe));
      EXPECT_EQ(moe->experts.size(), 4u);
    }
  }
}

// Every tensor of the dense path also has the form that the loaders expect.
TEST_P(EveryShape, LinearLayersLoadInEveryDialect) {
  if (GetParam().starts_with("gpt-oss")) return;
  for (const char* dialect : {"modelopt", "compressed-nvfp4", "compressed-mxfp4"}) {
    const TempFolder folder;
    MakeTinyOptions options = small_model(GetParam());
    options.dense_intermediate_size = 128;
    options.dialect = dialect;
    ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
    const auto config = load_model_config(folder.path());
    ASSERT_TRUE(is_ok(config));
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(is_ok(checkpoint));
    const Fp4Format format = is_mxfp4(config->quant.method) ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4;
    EXPECT_EQ(format == Fp4Format::kMxfp4, std::string(dialect) == "compressed-mxfp4");
    int num_mlps = 0;
    const auto expect_mlp = [&](const std::string& name, int64_t intermediate) {
      const auto mlp = load_mlp_weights(*checkpoint, *config, name, intermediate);
      ASSERT_TRUE(is_ok(mlp)) << dialect;
      EXPECT_TRUE(mlp->gate.is_fp4);
      EXPECT_EQ(mlp->gate.fp4.format, format);
      ++num_mlps;
    };
    for (int64_t layer = 0; layer < 2; ++layer) {
      const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp";
      if (!config->layer_has_experts[static_cast<size_t>(layer)]) {
        expect_mlp(mlp, 128);
        continue;
      }
      EXPECT_TRUE(is_ok(load_expert_weights(*checkpoint, *config, layer)));
      if (config->num_shared_experts > 0)
        expect_mlp(mlp + (config->shared_expert_gate ? ".shared_expert" : ".shared_experts"),
                   config->shared_intermediate_size);
    }
    EXPECT_EQ(num_mlps, config->family == ModelFamily::kQwen3Moe ? 0 : 2);
    const auto attention = load_linear_weights(
        *checkpoint, *config,
        config->has_state() ? "model.layers.1.self_attn.o_proj" : "model.layers.0.self_attn.o_proj", 96,
        config->family == ModelFamily::kDeepseekV3 ? 4 * config->mla.v_head_dim : 4 * config->head_dim);
    ASSERT_TRUE(is_ok(attention));
    EXPECT_FALSE(attention->is_fp4);
  }
}

// A layer for multi-token prediction has experts; modelopt leaves it in bf16.
TEST(MakeTiny, WritesLayersForMultiTokenPrediction) {
  for (const char* dialect : {"modelopt", "compressed-nvfp4", "bf16"}) {
    const TempFolder folder;
    MakeTinyOptions options = small_model("kimi-k2.5");
    options.dialect = dialect;
    options.num_mtp_layers = 1;
    ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
    auto config = load_model_config(folder.path());
    ASSERT_TRUE(is_ok(config));
    EXPECT_EQ(config->num_mtp_layers, 1);
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(is_ok(checkpoint));
    EXPECT_TRUE(is_ok(checkpoint->get("model.layers.2.eh_proj.weight", DType::kBF16, {96, 192})));
    const bool is_fp4 = dialect == std::string("compressed-nvfp4");
    EXPECT_EQ(stored_expert_format(*checkpoint, *config, 2), is_fp4 ? Fp4Format::kNvfp4 : Fp4Format::kNone);
    ++config->num_layers;
    config->layer_has_experts.push_back(true);
    EXPECT_EQ(is_ok(load_expert_weights(*checkpoint, *config, 2)), dialect != std::string("modelopt"));
    EXPECT_EQ(is_ok(load_unquantised_experts(*checkpoint, *config, 2)), !is_fp4);
  }
  MakeTinyOptions options = small_model("gpt-oss-tiny");
  options.num_mtp_layers = 1;
  const TempFolder folder;
  EXPECT_TRUE(
      fails_with(make_tiny(folder.path(), options), StatusCode::kInvalidArgument, {"num_mtp_layers"}));
}

// Published names, also in the declaration, which forgets "mtp.fc". The layer attends.
TEST(MakeTiny, WritesLayersBelowMtp) {
  for (const char* like : {"qwen3.5-moe-tiny", "qwen3-next-tiny"}) {
    const TempFolder folder;
    MakeTinyOptions options = small_model(like);
    options.dialect = "modelopt";
    options.num_mtp_layers = 1;
    ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
    const auto config = load_model_config(folder.path());
    ASSERT_TRUE(is_ok(config));
    std::ifstream file(folder.file("model.safetensors"), std::ios::binary);
    const std::string names(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(config->num_mtp_layers, 1);
    EXPECT_FALSE(config->may_have_mtp_layer);
    for (const char* name : {"mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden",
                             "mtp.layers.0.self_attn.q_norm", "mtp.layers.0.mlp.experts.3.up_proj",
                             "mtp.layers.0.mlp.shared_expert_gate"})
      EXPECT_NE(names.find('"' + std::string(name) + ".weight\""), std::string::npos) << name;
    EXPECT_EQ(names.find("layers.2."), std::string::npos);
    EXPECT_TRUE(is_excluded(config->quant, "model.layers.2.mlp.experts.0.gate_proj"));
    EXPECT_FALSE(is_excluded(config->quant, "model.layers.2.eh_proj"));
    EXPECT_FALSE(is_excluded(config->quant, "model.layers.1.mlp.experts.0.gate_proj"));
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(is_ok(checkpoint));
    EXPECT_TRUE(is_ok(checkpoint->get("model.layers.2.eh_proj.weight", DType::kBF16, {96, 192})));
    EXPECT_EQ(stored_expert_format(*checkpoint, *config, 2), Fp4Format::kNone);
    for (const bool loads_mtp : {false, true}) {
      const UnusedTensors unused = find_unused_tensors(*checkpoint, *config, loads_mtp);
      EXPECT_TRUE(unused.in_model.empty() && unused.elsewhere.empty()) << loads_mtp;
    }
  }
}

// The shapes have the parameters that the publishers state, in billions, without layers for multi-token
// prediction and vision models.
TEST(MakeTiny, ShapesHaveThePublishedNumberOfParameters) {
  const std::vector<std::pair<const char*, double>> rows = {
      {"gpt-oss-20b", 20.9},       {"gpt-oss-120b", 116.8},    {"deepseek-v3", 671},
      {"kimi-k2", 1026},           {"kimi-k2.5", 1026},        {"glm-4.5", 353},
      {"glm-4.5-air", 106.8},      {"glm-4.6", 353},           {"glm-4.7", 353},
      {"glm-4.7-flash", 29.9},     {"qwen3-30b-a3b", 30.5},    {"qwen3-vl-30b-a3b", 30.5},
      {"qwen3-vl-235b-a22b", 235}, {"qwen3-next-80b-a3b", 80}, {"qwen3.5-35b-a3b", 34.7},
      {"qwen3.5-122b-a10b", 122},  {"qwen3.5-397b-a17b", 397}};
  for (const auto& [like, billions] : rows) {
    MakeTinyOptions options;
    options.like = like;
    options.dialect = "bf16";
    const auto files = make_tiny_files(options);
    ASSERT_TRUE(is_ok(files));
    const auto config = parse_model_config(files->config.dump(), files->generation.dump(), "");
    ASSERT_TRUE(is_ok(config)) << like;
    double sum = 0;
    for (const TinyTensor& tensor : list_tiny_tensors(*config)) {
      double elements = 1;
      for (const int64_t dim : tensor.spec.shape) elements *= static_cast<double>(dim);
      sum += elements;
    }
    EXPECT_NEAR(sum / 1e9, billions, 0.005 * billions) << like;
  }
}

// The files have the published names; Checkpoint shows those of the text model.
TEST(MakeTiny, TensorsHaveThePublishedNames) {
  const std::vector<std::array<const char*, 3>> rows = {
      {"kimi-k2", "model.norm.weight", "lm_head.weight"},
      {"kimi-k2.5", "language_model.model.norm.weight", "language_model.lm_head.weight"},
      {"qwen3-vl-30b-a3b", "model.language_model.norm.weight", "lm_head.weight"},
      {"qwen3.5-moe-tiny", "model.language_model.norm.weight", "lm_head.weight"}};
  for (const auto& [like, norm, head] : rows) {
    const TempFolder folder;
    ASSERT_TRUE(is_ok(make_tiny(folder.path(), small_model(like))));
    const auto file = MappedFile::open(folder.file("model.safetensors"));
    ASSERT_TRUE(is_ok(file));
    const auto entries = parse_safetensors(file->bytes());
    ASSERT_TRUE(is_ok(entries));
    const auto holds = [&](const char* name) {
      return std::any_of(entries->begin(), entries->end(),
                         [&](const SafetensorsEntry& entry) { return entry.spec.name == name; });
    };
    EXPECT_TRUE(holds(norm) && holds(head)) << like;
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(is_ok(checkpoint));
    EXPECT_TRUE(checkpoint->find("model.norm.weight") && checkpoint->find("lm_head.weight")) << like;
  }
}

TEST(MakeTiny, WeightsHaveTheMagnitudesOfAnInitialisedModel) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(make_tiny(folder.path(), small_model("gpt-oss-tiny"))));
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(is_ok(checkpoint));
  const auto view = checkpoint->get("lm_head.weight", DType::kBF16, {300, 96});
  ASSERT_TRUE(is_ok(view));
  double sum = 0, squares = 0;
  const int64_t n = view->num_elems();
  for (int64_t i = 0; i < n; ++i) {
    const double x = bf16_to_float(view->as<bf16>()[i]);
    sum += x;
    squares += x * x;
  }
  // Within four standard errors of the mean and of the deviation of n draws.
  EXPECT_NEAR(sum / n, 0, 4 * 0.02 / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n), 0.02, 4 * 0.02 / std::sqrt(2 * n));
}

std::string file_bytes(const TempFolder& folder) {
  return read_text_file(folder.file("model.safetensors"), int64_t{1} << 30).value();
}

TEST(MakeTiny, SameSeedSameBytesAndShardsDoNotMatter) {
  const TempFolder first, again, other, sharded;
  MakeTinyOptions options = small_model("gpt-oss-tiny");
  options.seed = 1;
  ASSERT_TRUE(is_ok(make_tiny(first.path(), options)));
  ASSERT_TRUE(is_ok(make_tiny(again.path(), options)));
  EXPECT_TRUE(file_bytes(first) == file_bytes(again));
  options.num_shards = 5;
  ASSERT_TRUE(is_ok(make_tiny(sharded.path(), options)));
  options.num_shards = 1;
  options.seed = 2;
  ASSERT_TRUE(is_ok(make_tiny(other.path(), options)));
  EXPECT_FALSE(file_bytes(first) == file_bytes(other));

  const auto one = Checkpoint::open(first.path()), many = Checkpoint::open(sharded.path());
  ASSERT_TRUE(is_ok(one));
  ASSERT_TRUE(is_ok(many));
  ASSERT_EQ(one->tensors().size(), many->tensors().size());
  for (const TensorEntry& tensor : one->tensors()) {
    const auto same = many->get(tensor.name, tensor.view.dtype, tensor.view.shape);
    ASSERT_TRUE(is_ok(same));
    EXPECT_TRUE(std::equal(tensor.view.data, tensor.view.data + tensor.view.num_bytes(), same->data))
        << tensor.name;
  }
}

TEST(MakeTiny, BothTokenizersHaveTheBytesAndTheEndTokens) {
  for (const char* kind : {"json", "tiktoken"}) {
    const TempFolder folder;
    MakeTinyOptions options = small_model("gpt-oss-tiny");
    options.tokenizer = kind;
    options.vocab_size = 512;
    ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
    EXPECT_EQ(file_exists(folder.file("tiktoken.model")), options.tokenizer == "tiktoken");
    const auto tokenizer = Tokenizer::load(folder.path());
    ASSERT_TRUE(is_ok(tokenizer));
    EXPECT_LE(tokenizer->vocab_size(), 512);
    const auto config = load_model_config(folder.path());
    ASSERT_TRUE(is_ok(config));
    EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{tokenizer->find_token("<|endoftext|>"),
                                                           tokenizer->find_token("<|im_end|>")}));
    std::string bytes;
    for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
    const auto ids = tokenizer->encode(bytes + "<|im_start|>", false);
    ASSERT_TRUE(is_ok(ids));
    EXPECT_EQ(ids->back(), tokenizer->find_token("<|im_start|>"));
    EXPECT_EQ(tokenizer->decode(*ids, true).substr(0, 128), bytes.substr(0, 128));
  }
}

TEST(MakeTiny, RefusesWhatMakesNoModel) {
  const TempFolder folder;
  const std::string out = folder.file("out");
  const auto make = [&](auto edit) {
    MakeTinyOptions options = small_model("gpt-oss-tiny");
    edit(options);
    return make_tiny(out, options);
  };
  using O = MakeTinyOptions;
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  EXPECT_TRUE(
      fails_with(make([](O& o) { o.like = "llama"; }), kInvalid, {"'llama'", "gpt-oss-20b", "deepseek-v3"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.dialect = "gguf"; }), kInvalid, {"'gguf'", "modelopt"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.dialect = "modelopt"; }), StatusCode::kUnsupported, {"gpt_oss"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.rope_style = "x"; }), kInvalid, {"'x'", "new, old"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.tokenizer = "x"; }), kInvalid, {"'x'", "json, tiktoken"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.tokenizer = "tiktoken", o.vocab_size = 511; }), kInvalid,
                         {"vocab_size = 511", "512"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.hidden_size = 100; }), kInvalid, {"hidden_size = 100", "32"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.top_k = 5; }), kInvalid, {"num_experts_per_tok = 5"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.vocab_size = 258; }), kInvalid, {"vocab_size = 258", "259"}));
  EXPECT_TRUE(fails_with(make([](O& o) { o.num_groups = 2; }), kInvalid, {"num_groups", "gpt_oss"}));
  EXPECT_TRUE(
      fails_with(make([](O& o) { o.dense_intermediate_size = 64; }), kInvalid, {"dense_intermediate_size"}));
  EXPECT_FALSE(file_exists(out));
  EXPECT_TRUE(fails_with(make([](O& o) { o.num_shards = 1000; }), kInvalid, {"num_shards=1000"}));
}

TEST(MakeTiny, OnlyWritesIntoANewFolder) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(write_text_file(folder.file("precious"), "x")));
  EXPECT_TRUE(fails_with(make_tiny(folder.path(), small_model("gpt-oss-tiny")), StatusCode::kInvalidArgument,
                         {folder.path(), "not empty"}));
}

TEST(MakeTiny, RemovesWhatAnInterruptedWriterLeft) {
  const TempFolder folder;
  const std::string left = folder.file("model-00001-of-00009.safetensors.partial");
  ASSERT_TRUE(is_ok(write_text_file(left, "half")));
  EXPECT_TRUE(is_ok(make_tiny(folder.path(), small_model("gpt-oss-tiny"))));
  EXPECT_FALSE(file_exists(left));
  EXPECT_TRUE(file_exists(folder.file("config.json")));
}

// A writer of several shards that was killed leaves its index partial; without that, shards are precious.
TEST(MakeTiny, RemovesShardsThatAnInterruptedWriterLeft) {
  const TempFolder folder;
  const std::string shard = folder.file("model-00002-of-00012.safetensors"),
                    index = folder.file("model.safetensors.index.json.partial");
  ASSERT_TRUE(is_ok(write_text_file(shard, "whole")));
  MakeTinyOptions options = small_model("gpt-oss-tiny");
  options.num_shards = 3;
  EXPECT_TRUE(fails_with(make_tiny(folder.path(), options), StatusCode::kInvalidArgument, {"not empty"}));
  ASSERT_TRUE(is_ok(write_text_file(index, "")));
  ASSERT_TRUE(is_ok(write_text_file(folder.file("model-2-of-12.safetensors"), "precious")));
  EXPECT_TRUE(fails_with(make_tiny(folder.path(), options), StatusCode::kInvalidArgument, {"not empty"}));
  EXPECT_TRUE(file_exists(shard));
  std::filesystem::remove(folder.file("model-2-of-12.safetensors"));
  EXPECT_TRUE(is_ok(make_tiny(folder.path(), options)));
  EXPECT_FALSE(file_exists(shard) || file_exists(index));
  EXPECT_TRUE(is_ok(Checkpoint::open(folder.path()).status()));
}

TEST(MakeTiny, LeavesThePartialFileOfARunningWriter) {
  const TempFolder folder;
  Result<NewFile> running = NewFile::create(folder.file("model.safetensors"));
  ASSERT_TRUE(is_ok(running));
  EXPECT_TRUE(fails_with(make_tiny(folder.path(), small_model("gpt-oss-tiny")), StatusCode::kUnavailable,
                         {"model.safetensors.partial", "locked by another writer"}));
}

TEST(MakeTiny, RefusesADiskThatIsTooSmall) {
  const TempFolder folder;
  MakeTinyOptions options;
  options.like = "gpt-oss-120b";
  options.num_hidden_layers = 1024;
  options.num_experts = 4096;
  EXPECT_TRUE(fails_with(make_tiny(folder.path(), options), StatusCode::kDoesNotFit, {"bytes", "room for"}));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace fp4moe
