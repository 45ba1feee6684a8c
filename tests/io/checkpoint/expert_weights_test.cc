#include "io/checkpoint/expert_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "base/thread_pool.h"
#include "io/checkpoint/fp4_tensors.h"
#include "io/checkpoint/safetensors.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

constexpr int64_t kHidden = 64, kIntermediate = 32, kExperts = 3;
const std::string kPrefix = "model.layers.0.mlp.experts.";

ModelConfig make_config(QuantMethod method) {
  ModelConfig config;
  config.hidden_size = kHidden;
  config.intermediate_size = kIntermediate;
  config.num_experts = kExperts;
  config.num_layers = 2;
  config.layer_has_experts = {true, false};
  config.quant.method = method;
  return config;
}

// Returns a byte that depends on tensor and position and is a valid scale in both formats.
uint8_t byte_at(const std::string& name, int64_t i) {
  return static_cast<uint8_t>((name.size() * 31 + static_cast<size_t>(i) * 7) % 0x7F);
}

// A checkpoint of random-looking bytes with `edit` applied to every tensor's bytes.
using Edit = std::function<void(const std::string& name, std::vector<uint8_t>& bytes)>;
struct Fixture {
  TempFolder folder;
  Result<Checkpoint> checkpoint = not_found("not opened");

  Fixture(const std::vector<TensorSpec>& specs, const Edit& edit) {
    const auto fill = [&](const TensorSpec& spec, const ByteSink& sink) {
      std::vector<uint8_t> bytes(static_cast<size_t>(tensor_bytes(spec).value()));
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(spec.name, static_cast<int64_t>(i));
      if (spec.dtype == DType::kF32) {
        const float value = static_cast<float>(spec.name.size());
        std::memcpy(bytes.data(), &value, sizeof value);
      }
      if (edit) edit(spec.name, bytes);
      return sink(bytes);
    };
    EXPECT_TRUE(is_ok(write_safetensors_shards(folder.path(), specs, 1, fill)));
    checkpoint = Checkpoint::open(folder.path());
    EXPECT_TRUE(is_ok(checkpoint));
  }
};

std::vector<TensorSpec> gpt_oss_specs() {
  return {{kPrefix + "gate_up_proj_blocks", DType::kU8, {kExperts, 2 * kIntermediate, kHidden / 32, 16}},
          {kPrefix + "gate_up_proj_scales", DType::kU8, {kExperts, 2 * kIntermediate, kHidden / 32}},
          {kPrefix + "gate_up_proj_bias", DType::kBF16, {kExperts, 2 * kIntermediate}},
          {kPrefix + "down_proj_blocks", DType::kU8, {kExperts, kHidden, kIntermediate / 32, 16}},
          {kPrefix + "down_proj_scales", DType::kU8, {kExperts, kHidden, kIntermediate / 32}},
          {kPrefix + "down_proj_bias", DType::kBF16, {kExperts, kHidden}}};
}

std::vector<TensorSpec> modelopt_specs(bool with_input_scales = true,
                                       std::vector<int64_t> scalar_shape = {}) {
  std::vector<TensorSpec> specs;
  for (int64_t e = 0; e < kExperts; ++e)
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string prefix = kPrefix + std::to_string(e) + "." + name;
      const bool down = std::string(name) == "down_proj";
      const int64_t rows = down ? kHidden : kIntermediate, cols = down ? kIntermediate : kHidden;
      specs.push_back({prefix + ".weight", DType::kU8, {rows, cols / 2}});
      specs.push_back({prefix + ".weight_scale", DType::kF8E4M3, {rows, cols / 16}});
      specs.push_back({prefix + ".weight_scale_2", DType::kF32, scalar_shape});
      if (with_input_scales) specs.push_back({prefix + ".input_scale", DType::kF32, scalar_shape});
    }
  return specs;
}

// Checks that the view's rows are rows first_row + i * row_step of the [*, cols] matrix in tensors `codes`
// and `scales`.
void expect_rows(const Fp4MatrixView& view, const std::string& codes, const std::string& scales,
                 int64_t first_row, int64_t row_step) {
  const int64_t block = fp4_block(view.format);
  for (int64_t r = 0; r < view.rows; ++r) {
    const int64_t row = first_row + r * row_step;
    for (int64_t i = 0; i < view.cols / 2; ++i)
      ASSERT_EQ(view.codes[r * view.code_stride_bytes + i], byte_at(codes, row * view.cols / 2 + i));
    for (int64_t i = 0; i < view.cols / block; ++i)
      ASSERT_EQ(view.scales[r * view.scale_stride_bytes + i], byte_at(scales, row * (view.cols / block) + i));
  }
}

uint16_t bias_bits(const std::string& name, int64_t i) {
  return static_cast<uint16_t>(byte_at(name, 2 * i) | byte_at(name, 2 * i + 1) << 8);
}

TEST(GptOssExperts, AreStridedViewsOfTheFusedTensors) {
  const Fixture fixture(gpt_oss_specs(), nullptr);
  const auto moe = load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 0);
  ASSERT_TRUE(is_ok(moe));
  EXPECT_EQ(moe->format, Fp4Format::kMxfp4);
  EXPECT_EQ(moe->hidden_size, kHidden);
  EXPECT_EQ(moe->intermediate_size, kIntermediate);
  ASSERT_EQ(moe->experts.size(), static_cast<size_t>(kExperts));
  const std::string gate_up = kPrefix + "gate_up_proj", down = kPrefix + "down_proj";
  for (int64_t e = 0; e < kExperts; ++e) {
    const ExpertWeightsView& expert = moe->experts[static_cast<size_t>(e)];
    EXPECT_EQ(expert.gate.rows, kIntermediate);
    EXPECT_EQ(expert.gate.cols, kHidden);
    EXPECT_EQ(expert.down.rows, kHidden);
    EXPECT_EQ(expert.down.cols, kIntermediate);
    EXPECT_EQ(expert.gate.tensor_scale, 1);
    expect_rows(expert.gate, gate_up + "_blocks", gate_up + "_scales", e * 2 * kIntermediate, 2);
    expect_rows(expert.up, gate_up + "_blocks", gate_up + "_scales", e * 2 * kIntermediate + 1, 2);
    expect_rows(expert.down, down + "_blocks", down + "_scales", e * kHidden, 1);
    for (int64_t i = 0; i < kIntermediate; ++i) {
      const int64_t row = e * 2 * kIntermediate + 2 * i;
      EXPECT_EQ(expert.gate_bias[i * expert.gate_up_bias_stride].bits, bias_bits(gate_up + "_bias", row));
      EXPECT_EQ(expert.up_bias[i * expert.gate_up_bias_stride].bits, bias_bits(gate_up + "_bias", row + 1));
    }
    for (int64_t i = 0; i < kHidden; ++i)
      EXPECT_EQ(expert.down_bias[i].bits, bias_bits(down + "_bias", e * kHidden + i));
  }
}

TEST(GptOssExperts, NameTheScaleThatIsNaN) {
  const Fixture fixture(gpt_oss_specs(), [](const std::string& name, std::vector<uint8_t>& bytes) {
    if (name == kPrefix + "gate_up_proj_scales")
      bytes[static_cast<size_t>((2 * 2 * kIntermediate + 5) * 2 + 1)] = 0xFF;
  });
  EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 0),
                         StatusCode::kDataLoss,
                         {kPrefix + "gate_up_proj_scales", "0xFF", "expert 2, row 5, block 1", "0xFE"}));
}

TEST(GptOssExperts, AcceptEveryOtherScaleByte) {
  const Fixture fixture(gpt_oss_specs(), [](const std::string& name, std::vector<uint8_t>& bytes) {
    if (name.ends_with("_scales"))
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i % 255);
  });
  EXPECT_TRUE(is_ok(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 0)));
}

TEST(GptOssExperts, NameMissingAndWrongTensors) {
  for (size_t left_out = 0; left_out < gpt_oss_specs().size(); ++left_out) {
    std::vector<TensorSpec> specs = gpt_oss_specs();
    const std::string name = specs[left_out].name;
    specs.erase(specs.begin() + static_cast<std::ptrdiff_t>(left_out));
    const Fixture fixture(specs, nullptr);
    EXPECT_TRUE(
        fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 0),
                   StatusCode::kNotFound, {"'" + name + "'"}));
  }
  for (TensorSpec wrong : gpt_oss_specs()) {
    std::vector<TensorSpec> specs = gpt_oss_specs();
    for (TensorSpec& spec : specs)
      if (spec.name == wrong.name) spec.dtype = wrong.dtype == DType::kU8 ? DType::kI8 : DType::kF16;
    const Fixture fixture(specs, nullptr);
    EXPECT_TRUE(
        fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 0),
                   StatusCode::kInvalidArgument, {wrong.name, dtype_name(wrong.dtype)}));
  }
  ModelConfig larger = make_config(QuantMethod::kMxfp4GptOss);
  larger.num_experts = kExperts + 1;
  const Fixture fixture(gpt_oss_specs(), nullptr);
  EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, larger, 0), StatusCode::kInvalidArgument,
                         {"[3, 64, 2, 16]", "[4, 64, 2, 16]"}));
}

TEST(ModelOptExperts, AreTypedWithTheirScales) {
  for (const std::vector<int64_t>& scalar_shape : {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
    const Fixture fixture(modelopt_specs(true, scalar_shape), nullptr);
    const auto moe = load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kModelOptNvfp4), 0);
    ASSERT_TRUE(is_ok(moe));
    EXPECT_EQ(moe->format, Fp4Format::kNvfp4);
    for (int64_t e = 0; e < kExperts; ++e) {
      const ExpertWeightsView& expert = moe->experts[static_cast<size_t>(e)];
      const std::string prefix = kPrefix + std::to_string(e);
      expect_rows(expert.gate, prefix + ".gate_proj.weight", prefix + ".gate_proj.weight_scale", 0, 1);
      expect_rows(expert.up, prefix + ".up_proj.weight", prefix + ".up_proj.weight_scale", 0, 1);
      expect_rows(expert.down, prefix + ".down_proj.weight", prefix + ".down_proj.weight_scale", 0, 1);
      const auto length = [&](const char* rest) {
        return static_cast<float>(prefix.size() + std::strlen(rest));
      };
      EXPECT_EQ(expert.gate.tensor_scale, length(".gate_proj.weight_scale_2"));
      EXPECT_EQ(expert.down.tensor_scale, length(".down_proj.weight_scale_2"));
      EXPECT_EQ(expert.gate_input_scale, length(".gate_proj.input_scale"));
      EXPECT_EQ(expert.up_input_scale, length(".up_proj.input_scale"));
      EXPECT_EQ(expert.down_input_scale, length(".down_proj.input_scale"));
      EXPECT_EQ(expert.gate_bias, nullptr);
    }
  }
}

TEST(ModelOptExperts, MissingInputScalesAreOne) {
  const Fixture fixture(modelopt_specs(false), nullptr);
  const auto moe = load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kModelOptNvfp4), 0);
  ASSERT_TRUE(is_ok(moe));
  EXPECT_EQ(moe->experts[0].gate_input_scale, 1);
  EXPECT_EQ(moe->experts[2].down_input_scale, 1);
}

TEST(ModelOptExperts, RefuseTensorScalesThatAreNotFiniteAndPositive) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const char* suffix : {".weight_scale_2", ".input_scale"})
    for (const float bad : {0.0f, -1.0f, kInfinity, std::nanf("")}) {
      const std::string bad_name = kPrefix + "1.up_proj" + suffix;
      const Fixture fixture(modelopt_specs(), [&](const std::string& name, std::vector<uint8_t>& bytes) {
        if (name == bad_name) std::memcpy(bytes.data(), &bad, sizeof bad);
      });
      EXPECT_TRUE(
          fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kModelOptNvfp4), 0),
                     StatusCode::kDataLoss, {bad_name}));
    }
}

TEST(ModelOptExperts, RefuseEveryBlockScaleThatIsNegativeOrNaN) {
  const std::string bad_name = kPrefix + "1.down_proj.weight_scale";
  for (int byte = 0; byte < 256; ++byte) {
    const Fixture fixture(modelopt_specs(), [&](const std::string& name, std::vector<uint8_t>& bytes) {
      if (name == bad_name) bytes[7] = static_cast<uint8_t>(byte);
    });
    const auto moe = load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kModelOptNvfp4), 0);
    if (byte < 0x7F)
      EXPECT_TRUE(is_ok(moe)) << byte;
    else
      EXPECT_TRUE(fails_with(moe, StatusCode::kDataLoss, {bad_name, "row 3, block 1"})) << byte;
  }
}

std::vector<TensorSpec> compressed_specs(bool is_mx) {
  std::vector<TensorSpec> specs;
  for (int64_t e = 0; e < kExperts; ++e)
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string prefix = kPrefix + std::to_string(e) + "." + name;
      const bool down = std::string(name) == "down_proj";
      const int64_t rows = down ? kHidden : kIntermediate, cols = down ? kIntermediate : kHidden;
      specs.push_back({prefix + ".weight_packed", DType::kU8, {rows, cols / 2}});
      specs.push_back(
          {prefix + ".weight_scale", is_mx ? DType::kU8 : DType::kF8E4M3, {rows, cols / (is_mx ? 32 : 16)}});
      if (is_mx) continue;
      specs.push_back({prefix + ".weight_global_scale", DType::kF32, {1}});
      specs.push_back({prefix + ".input_global_scale", DType::kF32, {1}});
    }
  return specs;
}

TEST(CompressedExperts, AreTypedWithInvertedScales) {
  for (const bool is_mx : {false, true}) {
    const Fixture fixture(compressed_specs(is_mx), nullptr);
    const auto moe = load_expert_weights(
        *fixture.checkpoint,
        make_config(is_mx ? QuantMethod::kCompressedMxfp4 : QuantMethod::kCompressedNvfp4), 0);
    ASSERT_TRUE(is_ok(moe));
    EXPECT_EQ(moe->format, is_mx ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4);
    for (int64_t e = 0; e < kExperts; ++e) {
      const ExpertWeightsView& expert = moe->experts[static_cast<size_t>(e)];
      const std::string prefix = kPrefix + std::to_string(e);
      expect_rows(expert.gate, prefix + ".gate_proj.weight_packed", prefix + ".gate_proj.weight_scale", 0, 1);
      expect_rows(expert.up, prefix + ".up_proj.weight_packed", prefix + ".up_proj.weight_scale", 0, 1);
      expect_rows(expert.down, prefix + ".down_proj.weight_packed", prefix + ".down_proj.weight_scale", 0, 1);
      const auto inverse_length = [&](const char* rest) {
        return is_mx ? 1.0f : 1.0f / static_cast<float>(prefix.size() + std::strlen(rest));
      };
      EXPECT_EQ(expert.gate.tensor_scale, inverse_length(".gate_proj.weight_global_scale"));
      EXPECT_EQ(expert.up.tensor_scale, inverse_length(".up_proj.weight_global_scale"));
      EXPECT_EQ(expert.down_input_scale, inverse_length(".down_proj.input_global_scale"));
    }
  }
}

std::vector<TensorSpec> fused_modelopt_specs(std::vector<int64_t> gate_up_scale,
                                             std::vector<int64_t> down_scale) {
  const std::string gate_up = kPrefix + "gate_up_proj", down = kPrefix + "down_proj";
  return {{gate_up + ".weight", DType::kU8, {kExperts, 2 * kIntermediate, kHidden / 2}},
          {gate_up + ".weight_scale", DType::kF8E4M3, {kExperts, 2 * kIntermediate, kHidden / 16}},
          {gate_up + ".weight_scale_2", DType::kF32, gate_up_scale},
          {gate_up + ".input_scale", DType::kF32, gate_up_scale},
          {down + ".weight", DType::kU8, {kExperts, kHidden, kIntermediate / 2}},
          {down + ".weight_scale", DType::kF8E4M3, {kExperts, kHidden, kIntermediate / 16}},
          {down + ".weight_scale_2", DType::kF32, down_scale},
          {down + ".input_scale", DType::kF32, down_scale}};
}

// Fills scale tensors with 1, 2, 3, ...
void count_up(const std::string& name, std::vector<uint8_t>& bytes) {
  if (!name.ends_with("_scale_2") && !name.ends_with("input_scale")) return;
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    const float value = static_cast<float>(i + 1);
    std::memcpy(&bytes[4 * i], &value, sizeof value);
  }
}

TEST(FusedModelOptExperts, AreHalvesOfTheFusedTensorsWithScalesOfAnyShape) {
  struct Case {
    std::vector<int64_t> gate_up, down;
    float gate, up, down_value;  // scales of the last expert
  };
  for (const Case& c :
       {Case{{}, {}, 1, 1, 1}, Case{{1}, {1}, 1, 1, 1}, Case{{kExperts}, {kExperts}, 3, 3, 3},
        Case{{kExperts, 1}, {kExperts, 1}, 3, 3, 3}, Case{{kExperts, 2}, {kExperts}, 5, 6, 3}}) {
    const Fixture fixture(fused_modelopt_specs(c.gate_up, c.down), count_up);
    const auto moe = load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kModelOptNvfp4), 0);
    ASSERT_TRUE(is_ok(moe));
    const std::string gate_up = kPrefix + "gate_up_proj.weight", down = kPrefix + "down_proj.weight";
    for (int64_t e = 0; e < kExperts; ++e) {
      const ExpertWeightsView& expert = moe->experts[static_cast<size_t>(e)];
      const int64_t row = e * 2 * kIntermediate;
      expect_rows(expert.gate, gate_up, gate_up + "_scale", row, 1);
      expect_rows(expert.up, gate_up, gate_up + "_scale", row + kIntermediate, 1);
      expect_rows(expert.down, down, down + "_scale", e * kHidden, 1);
    }
    const ExpertWeightsView& last = moe->experts.back();
    EXPECT_EQ(last.gate.tensor_scale, c.gate);
    EXPECT_EQ(last.up.tensor_scale, c.up);
    EXPECT_EQ(last.down.tensor_scale, c.down_value);
    EXPECT_EQ(last.gate_input_scale, c.gate);
    EXPECT_EQ(last.up_input_scale, c.up);
    EXPECT_EQ(last.down_input_scale, c.down_value);
  }
}

TEST(FusedModelOptExperts, RefuseScalesThatDoNotFit) {
  const ModelConfig config = make_config(QuantMethod::kModelOptNvfp4);
  const Fixture three(fused_modelopt_specs({kExperts, 3}, {kExperts}), count_up);
  EXPECT_TRUE(fails_with(load_expert_weights(*three.checkpoint, config, 0), StatusCode::kInvalidArgument,
                         {"gate_up_proj.weight_scale_2", "[3, 3]"}));
  const Fixture halves_of_down(fused_modelopt_specs({kExperts}, {kExperts, 2}), count_up);
  EXPECT_TRUE(fails_with(load_expert_weights(*halves_of_down.checkpoint, config, 0),
                         StatusCode::kInvalidArgument, {"down_proj.weight_scale_2", "[3, 2]"}));
  const Fixture negative(fused_modelopt_specs({kExperts, 2}, {kExperts}),
                         [](const std::string& name, std::vector<uint8_t>& bytes) {
                           count_up(name, bytes);
                           if (name == kPrefix + "gate_up_proj.input_scale") bytes[4 * 3 + 3] |= 0x80;
                         });
  EXPECT_TRUE(fails_with(load_expert_weights(*negative.checkpoint, config, 0), StatusCode::kDataLoss,
                         {"gate_up_proj.input_scale'[3] is -4"}));
}

// Makes one scale byte of expert 1 NaN and checks that only ranges with expert 1 fail to load.
void expect_only_readers_of_expert_1_fail(const std::vector<TensorSpec>& specs, QuantMethod method,
                                          const std::string& name, size_t at) {
  const Fixture fixture(specs, [&](const std::string& tensor, std::vector<uint8_t>& bytes) {
    if (tensor == name) bytes[at] = 0xFF;
  });
  struct Case {
    ExpertRange local;
    bool reads;
  };
  for (const Case& c : {Case{{0, 1}, false},
                        {{2, 1}, false},
                        {{0, 0}, false},
                        {{3, 1}, false},
                        {{1, 1}, true},
                        {{0, 2}, true},
                        {{0, 3}, true},
                        {{1, 99}, true}}) {
    ThreadPool threads(3);
    for (ThreadPool* pool : {static_cast<ThreadPool*>(nullptr), &threads}) {
      const auto moe = load_expert_weights(*fixture.checkpoint, make_config(method), 0, c.local, pool);
      if (c.reads)
        EXPECT_TRUE(fails_with(moe, StatusCode::kDataLoss, {name, "0xFF", "row 0, block 0"}))
            << c.local.first;
      else
        EXPECT_TRUE(is_ok(moe)) << c.local.first << ", " << c.local.count;
    }
  }
}

TEST(Experts, OfOtherRanksKeepTheirScalesUnread) {
  expect_only_readers_of_expert_1_fail(modelopt_specs(), QuantMethod::kModelOptNvfp4,
                                       kPrefix + "1.up_proj.weight_scale", 0);
  expect_only_readers_of_expert_1_fail(gpt_oss_specs(), QuantMethod::kMxfp4GptOss,
                                       kPrefix + "down_proj_scales", kHidden * kIntermediate / 32);
  expect_only_readers_of_expert_1_fail(fused_modelopt_specs({}, {}), QuantMethod::kModelOptNvfp4,
                                       kPrefix + "gate_up_proj.weight_scale",
                                       2 * kIntermediate * kHidden / 16);
}

// The threads may find a later byte first; the error is that of the first byte.
TEST(Experts, TheFirstOfManyBadScalesIsNamedWithAnyNumberOfThreads) {
  constexpr int64_t kRows = 4096, kBlocks = 512;
  std::vector<uint8_t> bytes(static_cast<size_t>(kRows * kBlocks), 0x30);
  for (size_t at = 700 * kBlocks + 3; at < bytes.size(); at += 9999) bytes[at] = 0xFF;
  const TensorEntry entry{
      "scales", {.data = bytes.data(), .dtype = DType::kU8, .shape = {kRows, kBlocks}}, "f", 0};
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    for (int repeat = 0; repeat < 20; ++repeat) {
      const Status status = check_block_scales(Fp4Format::kNvfp4, entry, {}, &pool);
      EXPECT_NE(status.message().find("row 700, block 3;"), std::string::npos) << status.message();
    }
  }
}

TEST(Experts, ThatAreExcludedFromQuantisationAreNamed) {
  const Fixture fixture(modelopt_specs(), nullptr);
  ModelConfig config = make_config(QuantMethod::kModelOptNvfp4);
  config.quant.declared_by = "hf_quant_config.json";
  for (const char* pattern : {"model.layers.0*", "model.layers.0.mlp.experts", "*.experts.*"}) {
    config.quant.exclude_modules = {pattern};
    EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, config, 0), StatusCode::kUnsupported,
                           {kPrefix, "hf_quant_config.json"}));
  }
}

TEST(Experts, InFp8AreRefusedByName) {
  const Fixture fixture({{kPrefix + "0.gate_proj.weight", DType::kF8E4M3, {4, 4}},
                         {kPrefix + "0.gate_proj.weight_scale", DType::kF32, {}}},
                        nullptr);
  for (const QuantMethod method : {QuantMethod::kModelOptNvfp4, QuantMethod::kFp8Mxfp4})
    EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, make_config(method), 0),
                           StatusCode::kUnsupported, {kPrefix + "0.gate_proj", "F8_E4M3", "experts in FP4"}));
}

TEST(Experts, AreRefusedWhereThereAreNone) {
  const Fixture fixture(gpt_oss_specs(), nullptr);
  EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 1),
                         StatusCode::kInvalidArgument, {"layer 1", "dense"}));
  EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kNone), 0),
                         StatusCode::kUnsupported, {"no FP4 quantization", "gate_up_proj_blocks"}));
}

}  // namespace
}  // namespace fp4moe
