#include "io/write/quantize_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "formats/nvfp4.h"
#include "io/changed_checkpoint.h"
#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/expert_weights.h"
#include "io/checkpoint/safetensors.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/file.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

// A small bf16 checkpoint.
class Source {
 public:
  explicit Source(const std::string& like, const std::string& dialect = "bf16") {
    MakeTinyOptions options = small_model(like);
    options.dialect = dialect;
    EXPECT_TRUE(is_ok(make_tiny(path(), options)));
    EXPECT_TRUE(is_ok(write_text_file(path() + "/chat_template.jinja", "{{ messages }}")));
  }
  std::string path() const { return folder_.path() + "/source"; }
  std::string out() const { return folder_.path() + "/out"; }
  ModelConfig config() const { return *load_model_config(path()); }

  Result<QuantizeResult> quantize(const QuantizeOptions& options) const {
    ThreadPool pool(2);
    const auto checkpoint = Checkpoint::open(path());
    return quantize_checkpoint(*checkpoint, config(), out(), options, pool);
  }

 private:
  TempFolder folder_;
};

struct Case {
  const char* like;
  Fp4Format format;
  const char* dialect;
  QuantMethod method;
};
constexpr Case kCases[] = {
    {"gpt-oss-tiny", Fp4Format::kMxfp4, "gpt-oss", QuantMethod::kMxfp4GptOss},
    {"qwen3-moe-tiny", Fp4Format::kNvfp4, "modelopt", QuantMethod::kModelOptNvfp4},
    {"qwen3-moe-tiny", Fp4Format::kNvfp4, "compressed-tensors", QuantMethod::kCompressedNvfp4},
    {"qwen3-moe-tiny", Fp4Format::kMxfp4, "compressed-tensors", QuantMethod::kCompressedMxfp4},
    {"qwen2-moe-tiny", Fp4Format::kNvfp4, "modelopt", QuantMethod::kModelOptNvfp4},
    {"deepseek-v3-tiny", Fp4Format::kNvfp4, "modelopt", QuantMethod::kModelOptNvfp4},
    {"deepseek-v3-tiny", Fp4Format::kMxfp4, "compressed-tensors", QuantMethod::kCompressedMxfp4},
    {"qwen3-vl-30b-a3b", Fp4Format::kNvfp4, "modelopt", QuantMethod::kModelOptNvfp4},
    {"qwen3.5-moe-tiny", Fp4Format::kNvfp4, "modelopt", QuantMethod::kModelOptNvfp4},
    {"qwen3-next-tiny", Fp4Format::kNvfp4, "compressed-tensors", QuantMethod::kCompressedNvfp4},
};

class EveryDialect : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Quantize, EveryDialect, testing::ValuesIn(kCases), [](const auto& made) {
  std::string name =
      std::string(made.param.like) + "_" + fp4_format_name(made.param.format) + "_" + made.param.dialect;
  for (char& c : name) c = c == '-' || c == '.' ? '_' : c;
  return name;
});

struct WeightPlace {
  int64_t layer, expert;
  const char* projection;
  int64_t row, col;
};

// A weight of the source, read directly from its tensors.
float source_weight(const Checkpoint& source, bool gpt_oss, const WeightPlace& at) {
  const std::string experts = "model.layers." + std::to_string(at.layer) + ".mlp.experts.";
  if (!gpt_oss) {
    const TensorEntry& t =
        *source.find(experts + std::to_string(at.expert) + "." + at.projection + "_proj.weight");
    return bf16_to_float(t.view.as<bf16>()[at.row * t.view.shape[1] + at.col]);
  }
  const bool down = std::strcmp(at.projection, "down") == 0;
  const TensorEntry& t = *source.find(experts + (down ? "down_proj" : "gate_up_proj"));
  const int64_t column = down ? at.row : 2 * at.row + (std::strcmp(at.projection, "up") == 0);
  return bf16_to_float(t.view.as<bf16>()[(at.expert * t.view.shape[1] + at.col) * t.view.shape[2] + column]);
}

TEST_P(EveryDialect, LoadsAsPublishedOnesDoAndIsNearTheSource) {
  const Case& p = GetParam();
  const Source source(p.like);
  const auto result = source.quantize({.format = p.format, .dialect = p.dialect});
  ASSERT_TRUE(is_ok(result));
  EXPECT_EQ(result->dialect, p.dialect);
  const auto config = load_model_config(source.out());
  ASSERT_TRUE(is_ok(config));
  EXPECT_EQ(config->quant.method, p.method);
  const auto from = Checkpoint::open(source.path()), to = Checkpoint::open(source.out());
  ASSERT_TRUE(is_ok(to));
  EXPECT_EQ(result->written_bytes, to->total_bytes());
  const bool gpt_oss = config->family == ModelFamily::kGptOss;
  double error = 0, energy = 0;
  int64_t layers = 0;
  for (int64_t layer = 0; layer < config->num_layers; ++layer) {
    if (!config->layer_has_experts.empty() && !config->layer_has_experts[static_cast<size_t>(layer)])
      continue;
    ++layers;
    const auto experts = load_expert_weights(*to, *config, layer);
    ASSERT_TRUE(is_ok(experts));
    for (size_t e = 0; e < experts->experts.size(); ++e) {
      const ExpertWeightsView& w = experts->experts[e];
      EXPECT_EQ(w.gate.tensor_scale, w.up.tensor_scale) << "engines that fuse gate and up use one scale";
      for (const auto& [name, m] : {std::pair{"gate", &w.gate}, {"up", &w.up}, {"down", &w.down}})
        for (int64_t r = 0; r < m->rows; ++r)
          for (int64_t c = 0; c < m->cols; ++c) {
            const double x = source_weight(*from, gpt_oss, {layer, static_cast<int64_t>(e), name, r, c});
            error += (fp4_at(*m, r, c) - x) * (fp4_at(*m, r, c) - x);
            energy += x * x;
          }
    }
  }
  EXPECT_GT(layers, 0);
  const double relative = std::sqrt(error / energy);
  EXPECT_LT(relative, p.format == Fp4Format::kNvfp4 ? 0.105 : 0.14);
  EXPECT_GT(relative, 0.05) << "the weights were not quantised";
  double told = 0, told_energy = 0;
  for (const ProjectionError& e : result->errors)
    if (e.projection.find("experts") == 0) told += e.weights.error, told_energy += e.weights.energy;
  EXPECT_NEAR(std::sqrt(told / told_energy), relative, 1e-6);
  EXPECT_EQ(*read_text_file(source.out() + "/chat_template.jinja", 100), "{{ messages }}");
  EXPECT_EQ(*read_text_file(source.out() + "/tokenizer.json", 1 << 20),
            *read_text_file(source.path() + "/tokenizer.json", 1 << 20));
}

TEST_P(EveryDialect, LeavesTheRestAsItIs) {
  const Case& p = GetParam();
  const Source source(p.like);
  ASSERT_TRUE(is_ok(source.quantize({.format = p.format, .dialect = p.dialect, .num_shards = 3})));
  const auto from = Checkpoint::open(source.path()), to = Checkpoint::open(source.out());
  ASSERT_TRUE(is_ok(to));
  int64_t same = 0;
  for (const TensorEntry& tensor : from->tensors()) {
    const bool projection = tensor.name.find(".mlp.") != std::string::npos &&
                            tensor.name.find("_proj") != std::string::npos && !tensor.name.ends_with("_bias");
    const TensorEntry* copy = to->find(tensor.name);
    if (projection) continue;
    ASSERT_NE(copy, nullptr) << tensor.name;
    ASSERT_EQ(copy->view.shape, tensor.view.shape) << tensor.name;
    EXPECT_EQ(std::memcmp(copy->view.data, tensor.view.data, static_cast<size_t>(tensor.view.num_bytes())), 0)
        << tensor.name;
    ++same;
  }
  EXPECT_GT(same, 10);
}

TEST_P(EveryDialect, SearchingBringsTheErrorDown) {
  const Case& p = GetParam();
  const auto error = [&](ScaleSearch search) {
    const Source source(p.like);
    const auto result = source.quantize({.format = p.format, .dialect = p.dialect, .search = search});
    EXPECT_TRUE(is_ok(result));
    double sum = 0;
    for (const ProjectionError& e : result->errors) sum += e.weights.error;
    return sum;
  };
  EXPECT_LT(error(ScaleSearch::kMse), 0.95 * error(ScaleSearch::kAbsmax));
}

TEST(Quantize, InputScalesAreStoredInTheDialectsDirection) {
  for (const char* dialect : {"modelopt", "compressed-tensors"}) {
    const Source source("qwen3-moe-tiny");
    QuantizeOptions options{.format = Fp4Format::kNvfp4, .dialect = dialect};
    options.input_amax = [](const std::string& module) {
      return module.ends_with("down_proj") ? 5.25f : 10.5f;
    };
    ASSERT_TRUE(is_ok(source.quantize(options)));
    const auto config = load_model_config(source.out());
    const auto to = Checkpoint::open(source.out());
    const auto experts = load_expert_weights(*to, *config, 0);
    ASSERT_TRUE(is_ok(experts));
    EXPECT_FLOAT_EQ(experts->experts[1].gate_input_scale, 10.5f / kNvfp4Range) << dialect;
    EXPECT_FLOAT_EQ(experts->experts[1].down_input_scale, 5.25f / kNvfp4Range) << dialect;
  }
}

TEST(Quantize, ExcludedMlpsStayInBf16) {
  const Source source("deepseek-v3-tiny");
  ASSERT_TRUE(is_ok(source.quantize({.format = Fp4Format::kNvfp4, .exclude = {"*shared_experts*"}})));
  const auto config = load_model_config(source.out());
  const auto to = Checkpoint::open(source.out());
  const auto shared =
      load_mlp_weights(*to, *config, "model.layers.1.mlp.shared_experts", config->shared_intermediate_size);
  ASSERT_TRUE(is_ok(shared));
  EXPECT_FALSE(shared->gate.is_fp4);
  const auto dense = load_mlp_weights(*to, *config, "model.layers.0.mlp", config->dense_intermediate_size);
  ASSERT_TRUE(is_ok(dense));
  EXPECT_TRUE(dense->gate.is_fp4);
}

void expect_refused(const Source& source, const QuantizeOptions& options, StatusCode code,
                    const std::string& part) {
  const auto result = source.quantize(options);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), code);
  EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
}

TEST(Quantize, RefusesByName) {
  constexpr auto kUnsupported = StatusCode::kUnsupported;
  const Source gpt_oss("gpt-oss-tiny"), qwen("qwen3-moe-tiny"), done("gpt-oss-tiny", "gpt-oss");
  constexpr auto kMx = Fp4Format::kMxfp4, kNv = Fp4Format::kNvfp4;
  expect_refused(gpt_oss, {.format = kNv}, kUnsupported, "--format mxfp4");
  expect_refused(gpt_oss, {.format = kMx, .dialect = "modelopt"}, kUnsupported, "--dialect gpt-oss");
  expect_refused(qwen, {.format = kMx, .dialect = "modelopt"}, kUnsupported, "--dialect compressed-tensors");
  expect_refused(qwen, {.format = kMx, .dialect = "gguf"}, StatusCode::kInvalidArgument, "legal: auto");
  expect_refused(done, {.format = kMx}, kUnsupported, "already quantised");
  expect_refused(qwen, {.format = kMx, .exclude = {"*.experts.2.*"}}, kUnsupported,
                 "mlp.experts.2.gate_proj");
  expect_refused(Source("deepseek-v3-tiny"), {.format = kMx, .exclude = {"*shared_experts.up_proj"}},
                 kUnsupported, "1 of the 3 projections of 'model.layers.1.mlp.shared_experts'");
  EXPECT_FALSE(std::filesystem::exists(qwen.out())) << "a refused call writes nothing";
  std::filesystem::create_directories(qwen.out());
  ASSERT_TRUE(is_ok(write_text_file(qwen.out() + "/mine", "x")));
  expect_refused(qwen, {.format = kMx}, StatusCode::kInvalidArgument, "is not empty");
}

TEST(Quantize, NamesAWeightThatIsNotFinite) {
  const Source source("qwen3-moe-tiny");
  std::string text = *read_text_file(source.path() + "/model.safetensors", 1 << 28);
  const auto checkpoint = Checkpoint::open(source.path());
  const TensorEntry& tensor = *checkpoint->find("model.layers.1.mlp.experts.3.up_proj.weight");
  const bf16 nan = float_to_bf16(std::numeric_limits<float>::quiet_NaN());
  std::memcpy(text.data() + tensor.file_offset + (5 * 96 + 7) * 2, &nan, 2);
  ASSERT_TRUE(is_ok(write_text_file(source.path() + "/model.safetensors", text)));
  for (const Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
    expect_refused(source, {.format = format}, StatusCode::kDataLoss,
                   "'model.layers.1.mlp.experts.3.up_proj.weight' is not finite: output 5, input 7");
    std::filesystem::remove_all(source.out());
  }
}

// Copies each projection's matrices [rows, cols] of all experts of every layer into one tensor of the layer:
// [E, cols, rows] as Qwen3-VL is published, or [E, rows, cols] as transformers 5 saves it; gate rows first.
void fuse_experts(const Checkpoint& source, const ModelConfig& config, bool published,
                  ChangedCheckpoint& changed) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    for (const bool is_down : {false, true}) {
      const std::string experts = "model.layers." + std::to_string(layer) + ".mlp.experts.";
      const std::string fused = experts + (is_down ? "down_proj" : "gate_up_proj");
      const int64_t rows = is_down ? config.hidden_size : 2 * config.intermediate_size;
      const int64_t cols = is_down ? config.intermediate_size : config.hidden_size;
      changed.add(fused, DType::kBF16,
                  published ? std::vector<int64_t>{config.num_experts, cols, rows}
                            : std::vector<int64_t>{config.num_experts, rows, cols});
      bf16* out = reinterpret_cast<bf16*>(changed.writable(fused));
      for (int64_t e = 0; e < config.num_experts; ++e)
        for (int64_t r = 0; r < rows; ++r) {
          const bool is_up = !is_down && r >= rows / 2;
          const std::string name = experts + std::to_string(e) +
                                   (is_down ? ".down_proj"
                                    : is_up ? ".up_proj"
                                            : ".gate_proj") +
                                   ".weight";
          const bf16* row = source.find(name)->view.as<bf16>() + (is_up ? r - rows / 2 : r) * cols;
          for (int64_t c = 0; c < cols; ++c)
            out[e * rows * cols + (published ? c * rows + r : r * cols + c)] = row[c];
          if (r == rows - 1 || (!is_down && r == rows / 2 - 1)) changed.remove(name);
        }
    }
}

// Either order gives the bytes of the checkpoint that stores every expert separately.
TEST(Quantize, FusedExpertsGiveTheBytesOfSeparateOnes) {
  struct Target {
    Fp4Format format;
    const char* dialect;
  };
  for (const Target& target : {Target{Fp4Format::kNvfp4, "modelopt"},
                               {Fp4Format::kNvfp4, "compressed-tensors"},
                               {Fp4Format::kMxfp4, "compressed-tensors"}}) {
    QuantizeOptions options{.format = target.format, .dialect = target.dialect};
    if (target.format == Fp4Format::kNvfp4)
      options.input_amax = [](const std::string& module) {
        return module.ends_with("experts.1.up_proj") ? 7.0f : 2.0f;
      };
    const Source source("qwen3-vl-30b-a3b");
    const auto separate = source.quantize(options);
    ASSERT_TRUE(is_ok(separate));
    const auto from = Checkpoint::open(source.path()), expected = Checkpoint::open(source.out());
    for (const bool published : {true, false}) {
      ChangedCheckpoint changed(*from);
      fuse_experts(*from, source.config(), published, changed);
      const Checkpoint fused = changed.make();
      ASSERT_EQ(fused.total_bytes(), from->total_bytes());
      const std::string out = source.out() + (published ? "_published" : "_saved");
      int64_t done = 0, total = -1;
      options.progress = [&](int64_t d, int64_t t) { done = d, total = t; };
      ThreadPool pool(2);
      const auto result = quantize_checkpoint(fused, source.config(), out, options, pool);
      ASSERT_TRUE(is_ok(result));
      EXPECT_EQ(done, total) << "the parts of a tensor add up to it";
      EXPECT_EQ(result->num_modules, separate->num_modules);
      const auto to = Checkpoint::open(out);
      ASSERT_TRUE(is_ok(to));
      ASSERT_EQ(to->tensors().size(), expected->tensors().size());
      for (const TensorEntry& tensor : expected->tensors()) {
        const TensorEntry* made = to->find(tensor.name);
        ASSERT_NE(made, nullptr) << tensor.name;
        ASSERT_EQ(made->view.shape, tensor.view.shape) << tensor.name;
        ASSERT_EQ(
            std::memcmp(made->view.data, tensor.view.data, static_cast<size_t>(tensor.view.num_bytes())), 0)
            << tensor.name;
      }
      const auto config = load_model_config(out);
      ASSERT_TRUE(is_ok(config));
      EXPECT_TRUE(is_ok(check_unused_tensors(*to, *config, false)));
    }
  }
}

TEST(Quantize, NamesAWeightOfAFusedTensorThatIsNotFinite) {
  const Source source("qwen3-vl-30b-a3b");
  const ModelConfig config = source.config();
  const auto from = Checkpoint::open(source.path());
  ChangedCheckpoint changed(*from);
  fuse_experts(*from, config, true, changed);
  const std::string name = "model.layers.1.mlp.experts.gate_up_proj";
  const int64_t up_row = config.intermediate_size + 5, rows = 2 * config.intermediate_size;
  reinterpret_cast<bf16*>(changed.writable(name))[(3 * config.hidden_size + 7) * rows + up_row] =
      float_to_bf16(std::numeric_limits<float>::infinity());
  ThreadPool pool(2);
  const auto result = quantize_checkpoint(changed.make(), config, source.out(), {}, pool);
  EXPECT_TRUE(
      fails_with(result, StatusCode::kDataLoss,
                 {"'" + name + "' is not finite: expert 3, output " + std::to_string(up_row) + ", input 7"}));
}

TEST(Quantize, FusedExpertsOfOtherShapesAreRefused) {
  const Source source("qwen3-vl-30b-a3b");
  const ModelConfig config = source.config();
  const auto from = Checkpoint::open(source.path());
  ChangedCheckpoint changed(*from);
  fuse_experts(*from, config, true, changed);
  const std::string down = "model.layers.0.mlp.experts.down_proj";
  changed.remove(down);
  changed.add(down, DType::kBF16, {config.num_experts, config.hidden_size, config.intermediate_size});
  ThreadPool pool(2);
  EXPECT_TRUE(fails_with(quantize_checkpoint(changed.make(), config, source.out(), {}, pool),
                         StatusCode::kInvalidArgument,
                         {"gate_up_proj'", "'" + down + "'", "; the model needs"}));
  EXPECT_FALSE(std::filesystem::exists(source.out())) << "a refused call writes nothing";
}

// Other engines match the patterns against the stored names, and quantise all linear layers that none names.
TEST(Quantize, DeclaresTheStoredNamesOfAMultimodalCheckpoint) {
  const auto listed = [](const char* like, Fp4Format format) {
    const Source source(like);
    EXPECT_TRUE(is_ok(source.quantize({.format = format, .exclude = {"model.layers.7.*"}})));
    return *read_text_file(source.out() + "/config.json", 1 << 20);
  };
  const std::string qwen = listed("qwen3-vl-30b-a3b", Fp4Format::kNvfp4);
  for (const char* pattern :
       {"\"model.language_model.layers.*.self_attn*\"", "\"model.language_model.layers.*.mlp.gate\"",
        "\"model.language_model.embed_tokens\"", "\"lm_head\"", "\"model.visual*\"",
        "\"model.language_model.layers.7.*\""})
    EXPECT_NE(qwen.find(pattern), std::string::npos) << pattern;
  EXPECT_EQ(qwen.find("\"model.layers."), std::string::npos);
  const std::string compressed = listed("qwen3-vl-30b-a3b", Fp4Format::kMxfp4);
  for (const char* pattern : {"\"re:model.visual.*\"", "\"re:.*self_attn.*\""})
    EXPECT_NE(compressed.find(pattern), std::string::npos) << pattern;
  const std::string kimi = listed("kimi-k2.5", Fp4Format::kNvfp4);
  for (const char* pattern : {"\"language_model.lm_head\"", "\"language_model.model.layers.*.self_attn*\"",
                              "\"vision_tower*\"", "\"mm_projector*\""})
    EXPECT_NE(kimi.find(pattern), std::string::npos) << pattern;
  EXPECT_EQ(listed("qwen3-moe-tiny", Fp4Format::kNvfp4).find("visual"), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
