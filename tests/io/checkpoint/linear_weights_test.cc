#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "io/checkpoint/expert_weights.h"
#include "io/checkpoint/safetensors.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

constexpr int64_t kRows = 6, kCols = 64;
const std::string kName = "model.layers.0.self_attn.q_proj";

ModelConfig make_config(QuantMethod method) {
  ModelConfig config;
  config.hidden_size = kCols;
  config.num_layers = 1;
  config.quant.method = method;
  config.quant.declared_by = "the declaration";
  return config;
}

// Byte i is i % 0x7F, which is a valid scale in both formats; an f32 tensor contains `scale`.
struct Fixture {
  TempFolder folder;
  Result<Checkpoint> checkpoint = not_found("not opened");

  explicit Fixture(const std::vector<TensorSpec>& specs, float scale = 0.25f) {
    const auto fill = [&](const TensorSpec& spec, const ByteSink& sink) {
      std::vector<uint8_t> bytes(static_cast<size_t>(tensor_bytes(spec).value()));
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i % 0x7F);
      if (spec.dtype == DType::kF32) std::memcpy(bytes.data(), &scale, sizeof scale);
      return sink(bytes);
    };
    EXPECT_TRUE(is_ok(write_safetensors_shards(folder.path(), specs, 1, fill)));
    checkpoint = Checkpoint::open(folder.path());
    EXPECT_TRUE(is_ok(checkpoint));
  }

  Result<LinearWeightsView> load(const ModelConfig& config, bool has_bias = false) const {
    return load_linear_weights(*checkpoint, config, kName, kRows, kCols, has_bias);
  }
};

std::vector<TensorSpec> fp4_specs(QuantMethod method, const std::string& name, int64_t rows, int64_t cols) {
  const bool is_modelopt = method == QuantMethod::kModelOptNvfp4, is_mx = is_mxfp4(method);
  std::vector<TensorSpec> specs = {
      {name + (is_modelopt ? ".weight" : ".weight_packed"), DType::kU8, {rows, cols / 2}},
      {name + ".weight_scale", is_mx ? DType::kU8 : DType::kF8E4M3, {rows, cols / (is_mx ? 32 : 16)}}};
  if (is_mx) return specs;
  specs.push_back({name + (is_modelopt ? ".weight_scale_2" : ".weight_global_scale"), DType::kF32, {1}});
  specs.push_back({name + (is_modelopt ? ".input_scale" : ".input_global_scale"), DType::kF32, {1}});
  return specs;
}

TEST(LinearWeights, EveryDialectIsTyped) {
  for (const QuantMethod method :
       {QuantMethod::kModelOptNvfp4, QuantMethod::kCompressedNvfp4, QuantMethod::kCompressedMxfp4}) {
    const Fixture fixture(fp4_specs(method, kName, kRows, kCols));
    const auto linear = fixture.load(make_config(method));
    ASSERT_TRUE(is_ok(linear));
    EXPECT_TRUE(linear->is_fp4);
    EXPECT_EQ(linear->fp4.format, is_mxfp4(method) ? Fp4Format::kMxfp4 : Fp4Format::kNvfp4);
    EXPECT_EQ(linear->fp4.rows, kRows);
    EXPECT_EQ(linear->fp4.cols, kCols);
    EXPECT_EQ(linear->fp4.codes[1 * linear->fp4.code_stride_bytes], kCols / 2);
    EXPECT_EQ(linear->fp4.scales[1 * linear->fp4.scale_stride_bytes], kCols / fp4_block(linear->fp4.format));
    EXPECT_EQ(linear->n, kRows);
    EXPECT_EQ(linear->k, kCols);
    // ModelOpt stores the scale 0.25 as a factor, compressed-tensors stores it as a divisor.
    const float scale = method == QuantMethod::kModelOptNvfp4 ? 0.25f : is_mxfp4(method) ? 1 : 4;
    EXPECT_EQ(linear->fp4.tensor_scale, scale);
    EXPECT_EQ(linear->input_scale, scale);
  }
}

TEST(LinearWeights, DivisorsAreInvertedByOneDivision) {
  const float divisor = 1234.567f;
  const QuantMethod method = QuantMethod::kCompressedNvfp4;
  const Fixture fixture(fp4_specs(method, kName, kRows, kCols), divisor);
  const auto linear = fixture.load(make_config(method));
  ASSERT_TRUE(is_ok(linear));
  EXPECT_EQ(linear->fp4.tensor_scale, 1.0f / divisor);
}

TEST(LinearWeights, ScalesThatAreNotFiniteAndPositiveAreNamed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0f, -2.0f, kInfinity, std::nanf("")})
    for (const QuantMethod method : {QuantMethod::kModelOptNvfp4, QuantMethod::kCompressedNvfp4}) {
      const Fixture fixture(fp4_specs(method, kName, kRows, kCols), bad);
      EXPECT_TRUE(fails_with(fixture.load(make_config(method)), StatusCode::kDataLoss,
                             {kName + ".weight_", "legal: finite numbers above 0"}));
    }
  // A divisor whose reciprocal overflows.
  const Fixture tiny(fp4_specs(QuantMethod::kCompressedNvfp4, kName, kRows, kCols), 1e-45f);
  EXPECT_TRUE(fails_with(tiny.load(make_config(QuantMethod::kCompressedNvfp4)), StatusCode::kDataLoss,
                         {kName + ".weight_global_scale", "reciprocal"}));
}

TEST(LinearWeights, InputScalesMayBeMissing) {
  for (const QuantMethod method : {QuantMethod::kModelOptNvfp4, QuantMethod::kCompressedNvfp4}) {
    std::vector<TensorSpec> specs = fp4_specs(method, kName, kRows, kCols);
    specs.pop_back();
    const Fixture fixture(specs);
    const auto linear = fixture.load(make_config(method));
    ASSERT_TRUE(is_ok(linear));
    EXPECT_EQ(linear->input_scale, 1);
  }
}

TEST(LinearWeights, UnquantisedOnesAreBf16) {
  const Fixture fixture(
      {{kName + ".weight", DType::kBF16, {kRows, kCols}}, {kName + ".bias", DType::kBF16, {kRows}}});
  for (const QuantMethod method : {QuantMethod::kNone, QuantMethod::kMxfp4GptOss, QuantMethod::kModelOptNvfp4,
                                   QuantMethod::kCompressedNvfp4}) {
    const auto linear = fixture.load(make_config(method), /*has_bias=*/true);
    ASSERT_TRUE(is_ok(linear));
    EXPECT_FALSE(linear->is_fp4);
    EXPECT_EQ(linear->weight[0].bits, 0x0100);
    EXPECT_EQ(linear->bias[1].bits, 0x0302);
  }
  const Fixture no_bias({{kName + ".weight", DType::kBF16, {kRows, kCols}}});
  EXPECT_TRUE(fails_with(no_bias.load(make_config(QuantMethod::kNone), true), StatusCode::kNotFound,
                         {kName + ".bias"}));
  EXPECT_TRUE(fails_with(
      load_linear_weights(*no_bias.checkpoint, make_config(QuantMethod::kNone), kName, kRows + 1, kCols),
      StatusCode::kInvalidArgument, {"[6, 64]", "[7, 64]"}));
}

TEST(LinearWeights, Fp4ThatTheDeclarationExcludesIsAContradiction) {
  const Fixture fixture(fp4_specs(QuantMethod::kModelOptNvfp4, kName, kRows, kCols));
  ModelConfig config = make_config(QuantMethod::kModelOptNvfp4);
  config.quant.exclude_modules = {"model.layers.*.self_attn*"};
  EXPECT_TRUE(fails_with(fixture.load(config), StatusCode::kInvalidArgument, {kName, "the declaration"}));
}

TEST(LinearWeights, Fp8IsRefusedByModuleName) {
  const Fixture fixture({{kName + ".weight", DType::kF8E4M3, {kRows, kCols}}});
  EXPECT_TRUE(fails_with(fixture.load(make_config(QuantMethod::kModelOptNvfp4)), StatusCode::kUnsupported,
                         {"'" + kName + "'", "F8_E4M3", "FP4 and bf16"}));
}

TEST(LinearWeights, WidthsThatCutABlockAreRefused) {
  const Fixture fixture(fp4_specs(QuantMethod::kModelOptNvfp4, kName, kRows, kCols));
  EXPECT_TRUE(fails_with(load_linear_weights(*fixture.checkpoint, make_config(QuantMethod::kModelOptNvfp4),
                                             kName, kRows, kCols - 8),
                         StatusCode::kInvalidArgument, {kName, "56", "multiples of 16"}));
}

TEST(MlpWeights, AreThreeLinearsOfOneKind) {
  constexpr int64_t kInter = 32;
  const std::string prefix = "model.layers.0.mlp";
  const QuantMethod method = QuantMethod::kCompressedNvfp4;
  std::vector<TensorSpec> specs;
  const auto add = [&](const char* name, int64_t rows, int64_t cols) {
    for (const TensorSpec& spec : fp4_specs(method, prefix + name, rows, cols)) specs.push_back(spec);
  };
  add(".gate_proj", kInter, kCols);
  add(".up_proj", kInter, kCols);
  std::vector<TensorSpec> mixed = specs;
  add(".down_proj", kCols, kInter);
  mixed.push_back({prefix + ".down_proj.weight", DType::kBF16, {kCols, kInter}});
  const Fixture fixture(specs), mixed_fixture(mixed);
  const auto mlp = load_mlp_weights(*fixture.checkpoint, make_config(method), prefix, kInter);
  ASSERT_TRUE(is_ok(mlp));
  EXPECT_EQ(mlp->hidden_size, kCols);
  EXPECT_EQ(mlp->intermediate_size, kInter);
  EXPECT_EQ(mlp->gate.n, kInter);
  EXPECT_EQ(mlp->up.k, kCols);
  EXPECT_EQ(mlp->down.n, kCols);
  EXPECT_EQ(mlp->down.k, kInter);
  EXPECT_TRUE(fails_with(load_mlp_weights(*mixed_fixture.checkpoint, make_config(method), prefix, kInter),
                         StatusCode::kUnsupported, {prefix, "mixes"}));
}

}  // namespace
}  // namespace fp4moe
