#include "io/expert_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "io/safetensors.h"
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

// A byte that depends on the tensor and the position, and is a legal scale of both formats.
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

// Rows of the view are rows first_row + i * row_step of the [*, cols] matrix in tensors `codes` and `scales`.
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

TEST(Experts, AreRefusedWhereThereAreNone) {
  const Fixture fixture(gpt_oss_specs(), nullptr);
  EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kMxfp4GptOss), 1),
                         StatusCode::kInvalidArgument, {"layer 1", "dense"}));
  EXPECT_TRUE(fails_with(load_expert_weights(*fixture.checkpoint, make_config(QuantMethod::kNone), 0),
                         StatusCode::kUnsupported, {"MXFP4", "NVFP4"}));
}

}  // namespace
}  // namespace fp4moe
