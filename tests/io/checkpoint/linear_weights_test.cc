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

// FP8 codes [n, k] and a scale tensor.
std::vector<TensorSpec> fp8_specs(const char* suffix, DType dtype, std::vector<int64_t> shape, int64_t n,
                                  int64_t k) {
  return {{kName + ".weight", DType::kF8E4M3, {n, k}}, {kName + suffix, dtype, std::move(shape)}};
}

TEST(LinearWeights, Fp8IsTypedByTheScalesBesideIt) {
  struct Case {
    const char* suffix;
    DType dtype;
    std::vector<int64_t> shape;
    int64_t row_block, col_block;
    float first;  // scale, as Fixture fills it
  };
  constexpr int64_t kN = 130, kK = 200;
  const Case cases[] = {
      {".weight_scale_inv", DType::kF32, {2, 2}, 128, 128, 0.25f},
      {".scale", DType::kF8E8M0, {2, 2}, 128, 128, 0},  // byte 0 is 2^-127, which counts as zero
      {".weight_scale", DType::kF32, {}, kN, kK, 0.25f},
      {".weight_scale", DType::kF32, {1}, kN, kK, 0.25f},
      {".weight_scale", DType::kBF16, {kN, 1}, 1, kK, bf16_to_float(bf16{0x0100})},
      {".weight_scale", DType::kF32, {kN}, 1, kK, 0.25f},
  };
  for (const Case& c : cases) {
    const Fixture fixture(fp8_specs(c.suffix, c.dtype, c.shape, kN, kK));
    for (const QuantMethod method : {QuantMethod::kModelOptNvfp4, QuantMethod::kFp8Mxfp4}) {
      ModelConfig config = make_config(method);
      config.quant.exclude_modules = {"*.self_attn.*"};
      const auto linear = load_linear_weights(*fixture.checkpoint, config, kName, kN, kK);
      ASSERT_TRUE(is_ok(linear)) << c.suffix;
      ASSERT_TRUE(linear->is_fp8());
      EXPECT_FALSE(linear->is_fp4);
      EXPECT_EQ(linear->fp8.row_block, c.row_block);
      EXPECT_EQ(linear->fp8.col_block, c.col_block);
      EXPECT_EQ(linear->fp8.scales[0], c.first);
      EXPECT_EQ(linear->fp8.codes[129], 129 % 0x7F);
      EXPECT_EQ(std::ssize(*linear->fp8_scales),
                c.shape.empty() ? 1 : fixture.checkpoint->find(kName + c.suffix)->view.num_elems());
    }
  }
}

TEST(LinearWeights, E8m0ScalesAreWidened) {
  const Fixture fixture(fp8_specs(".scale", DType::kF8E8M0, {2, 2}, 130, 200));
  const auto linear =
      load_linear_weights(*fixture.checkpoint, make_config(QuantMethod::kFp8Mxfp4), kName, 130, 200);
  ASSERT_TRUE(is_ok(linear));
  EXPECT_EQ(linear->fp8.scales[1], 0x1p-126f);
  EXPECT_EQ(linear->fp8.scales[3], 0x1p-124f);
}

TEST(LinearWeights, Fp8WithoutAGoodScaleIsRefusedByName) {
  const ModelConfig config = make_config(QuantMethod::kModelOptNvfp4);
  const Fixture no_scale({{kName + ".weight", DType::kF8E4M3, {kRows, kCols}}});
  EXPECT_TRUE(fails_with(no_scale.load(config), StatusCode::kUnsupported,
                         {"'" + kName + "'", "F8_E4M3", "weight_scale_inv"}));
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{2}, {1, 6}, {6, 64}, {1, 2}})
    EXPECT_TRUE(fails_with(Fixture(fp8_specs(".weight_scale", DType::kF32, shape, kRows, kCols)).load(config),
                           StatusCode::kInvalidArgument, {kName + ".weight_scale", "[6, 1]", "[1, 1]"}));
  EXPECT_TRUE(fails_with(Fixture(fp8_specs(".weight_scale", DType::kF16, {}, kRows, kCols)).load(config),
                         StatusCode::kInvalidArgument, {kName + ".weight_scale", "F16", "F8_E8M0"}));
  for (const float bad : {-1.0f, std::numeric_limits<float>::infinity(), std::nanf("")})
    EXPECT_TRUE(
        fails_with(Fixture(fp8_specs(".weight_scale", DType::kF32, {}, kRows, kCols), bad).load(config),
                   StatusCode::kDataLoss, {kName + ".weight_scale", "element 0"}));
  const Fixture undeclared(fp8_specs(".weight_scale", DType::kF32, {}, kRows, kCols));
  EXPECT_TRUE(fails_with(undeclared.load(make_config(QuantMethod::kNone)), StatusCode::kUnsupported,
                         {kName + ".weight_scale", "declares no quantization"}));
}

// The tensors of the dialects that store FP4 codes under another dtype or scales under another name.
TEST(LinearWeights, Fp4DialectsWithOtherTypesAreTyped) {
  const auto specs = [](const char* scales, DType code_dtype, DType scale_dtype) {
    return std::vector<TensorSpec>{{kName + ".weight", code_dtype, {kRows, kCols / 2}},
                                   {kName + scales, scale_dtype, {kRows, kCols / 32}}};
  };
  const Fixture quark(specs(".weight_scale", DType::kU8, DType::kU8));
  const Fixture deepseek(specs(".scale", DType::kI8, DType::kF8E8M0));
  for (const auto& [fixture, method] :
       {std::pair<const Fixture&, QuantMethod>{quark, QuantMethod::kQuarkMxfp4},
        {deepseek, QuantMethod::kFp8Mxfp4}}) {
    const auto linear = fixture.load(make_config(method));
    ASSERT_TRUE(is_ok(linear));
    EXPECT_TRUE(linear->is_fp4);
    EXPECT_EQ(linear->fp4.format, Fp4Format::kMxfp4);
    EXPECT_EQ(linear->fp4.codes[kCols / 2], kCols / 2);
    EXPECT_EQ(linear->fp4.scales[1], 1);
    EXPECT_EQ(linear->fp4.tensor_scale, 1);
  }
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
