// All families but gpt_oss against the stock Hugging Face classes: random checkpoints in native FP4 dialects
// (make_moe_fixtures.py), and the second demo.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/check.h"
#include "formats/nvfp4.h"
#include "io/changed_checkpoint.h"
#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/safetensors.h"
#include "io/config/model_config.h"
#include "reference_prompt.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr double kFloat32Limit = 1e-4;  // every position; measured below 3e-6

EngineConfig flags_of(const char* fp4_compute, bool reference, bool is_bf16 = false) {
  EngineConfig flags;
  flags.fp4_compute = fp4_compute;
  flags.threads = 2;
  if (!reference) return flags;
  flags.dtype = "float32";
  flags.moe_runner_backend = is_bf16 ? "ref_bf16" : "ref";
  return flags;
}

// Relative L2 errors of the positions, ascending, and the share with the reference's argmax.
struct Agreement {
  std::vector<double> errors;
  double same_argmax = 0, whole = 0;

  double median() const { return errors[errors.size() / 2]; }
  double within(double limit) const {
    const auto end = std::upper_bound(errors.begin(), errors.end(), limit);
    return static_cast<double>(end - errors.begin()) / static_cast<double>(errors.size());
  }
};

Agreement agreement(const std::vector<float>& logits, const ReferencePrompt& prompt) {
  Agreement a;
  const size_t v = logits.size() / prompt.ids.size(), num_rows = prompt.logits.size() / v;
  const auto last = std::span(logits).last(num_rows * v);
  for (size_t r = 0; r < num_rows; ++r) {
    const auto actual = last.subspan(r * v, v), expected = std::span(prompt.logits).subspan(r * v, v);
    a.errors.push_back(relative_l2(actual, expected));
    const bool same = std::max_element(actual.begin(), actual.end()) - actual.begin() ==
                      std::max_element(expected.begin(), expected.end()) - expected.begin();
    a.same_argmax += static_cast<double>(same) / static_cast<double>(num_rows);
  }
  std::sort(a.errors.begin(), a.errors.end());
  a.whole = relative_l2(last, prompt.logits);
  return a;
}

struct Case {
  const char* name;
  bool has_w4a4;
  bool is_bf16 = false;  // not quantised: has w4a16 only
};

class Fixture : public testing::TestWithParam<Case> {
 protected:
  std::string folder() const { return std::string(FP4MOE_FIXTURES "/") + GetParam().name; }
  // `errors` is empty if something failed.
  Agreement run(const char* fp4_compute, bool reference) const {
    const auto prompt =
        read_reference(folder() + "/expected.safetensors", "ids", std::string("logits_") + fp4_compute);
    EXPECT_TRUE(prompt.ok()) << prompt.status().to_string();
    if (!prompt.ok()) return {};
    const auto logits =
        compute_logits({folder(), flags_of(fp4_compute, reference, GetParam().is_bf16)}, prompt->ids);
    EXPECT_TRUE(logits.ok()) << logits.status().to_string();
    return logits.ok() ? agreement(*logits, *prompt) : Agreement{};
  }
};

TEST_P(Fixture, ReferenceRunnerMatchesStockClass) {
  const Agreement a = run("w4a16", true);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.errors.back(), kFloat32Limit);
}

// A rounding tie can flip a code, which changes the logits of later positions.
TEST_P(Fixture, QuantisedActivationsMatchTheRule) {
  if (!GetParam().has_w4a4) {
    EXPECT_FALSE(compute_logits({folder(), flags_of("w4a4", true)}, {1, 2, 3}).ok());
    return;
  }
  const Agreement a = run("w4a4", true);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.median(), kFloat32Limit);
  EXPECT_GE(a.within(1e-3), 0.75);
}

// Random weights amplify the rounding of activations to bf16 more than trained ones; the error must be
// visible but small.
TEST_P(Fixture, DefaultRunnerIsNearTheStockClass) {
  const Agreement a = run("w4a16", false);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.whole, 2e-2);
  EXPECT_GE(a.whole, 1e-6) << "bf16 activations cannot be this close";
}

TEST_P(Fixture, ChunksPagesAndThreadsChangeNoBit) {
  const auto config = load_model_config(folder());
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  std::vector<int32_t> ids(19);
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(static_cast<int64_t>(i) * 37 % std::min<int64_t>(97, config->vocab_size));
  for (const char* compute : {"w4a16", "w4a8"}) {
    if (GetParam().is_bf16 && compute == std::string("w4a8")) continue;
    const auto whole = compute_logits({folder(), flags_of(compute, false)}, ids);
    ASSERT_TRUE(whole.ok()) << whole.status().to_string();
    for (const int64_t chunk : {1, 7}) {
      LogitsRun parts{folder(), flags_of(compute, false), chunk, static_cast<int>(chunk + 2)};
      parts.flags.threads = 3;
      const auto logits = compute_logits(parts, ids);
      ASSERT_TRUE(logits.ok()) << logits.status().to_string();
      EXPECT_EQ(*logits, *whole) << compute << ", chunk " << chunk;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, Fixture,
    testing::Values(Case{"dsv3_h96_modelopt_yarn", true}, Case{"dsv3_h64_compressed_sharded", true},
                    Case{"qwen3_h96_fused_old_rope", true}, Case{"qwen3_h96_compressed_mxfp4_tied", false},
                    Case{"qwen2_h64_shared_expert", true}, Case{"glm4_h32_partial_rotary", true},
                    Case{"glm4_lite_h32_layer_types", true}, Case{"kimi_k2_h48_equal_betas", true},
                    Case{"qwen3_vl_h64_mrope", false}, Case{"qwen3_vl_h32_bf16_fused", false, true},
                    Case{"kimi_k25_h48_vision", true}, Case{"dsv3_h160_fp8_blocks", false},
                    Case{"dsv3_h64_quark", false}, Case{"qwen3_h64_modelopt_mixed", true},
                    Case{"qwen3_h64_compressed_mixed", true}, Case{"qwen3_next_h32_interleaved", true},
                    Case{"qwen3_5_h32_modelopt_mixed", true}),
    [](const auto& test) { return std::string(test.param.name); });

// Layers with states, over prompts of more than two chunks of 64 tokens.
class States : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto prompt = read_reference(folder() + "/expected.safetensors", "ids", "logits_w4a16");
    ASSERT_TRUE(prompt.ok()) << prompt.status().to_string();
    ids_ = prompt->ids;
    ASSERT_GT(ids_.size(), 128u);
  }
  std::string folder() const { return std::string(FP4MOE_FIXTURES "/") + GetParam(); }
  std::vector<float> logits(const std::vector<int32_t>& ids, int64_t chunk = 0,
                            bool reference = false) const {
    const auto result = compute_logits({folder(), flags_of("w4a16", reference), chunk}, ids);
    EXPECT_TRUE(result.ok()) << result.status().to_string();
    return result.ok() ? *result : std::vector<float>{};
  }
  std::vector<int32_t> ids_;
};

TEST_P(States, NoCutChangesABit) {
  const std::vector<float> whole = logits(ids_);
  ASSERT_FALSE(whole.empty());
  for (int64_t chunk = 1; chunk < std::ssize(ids_); ++chunk)
    ASSERT_TRUE(logits(ids_, chunk) == whole) << "chunk " << chunk;
}

TEST_P(States, NoCutChangesABitOfTheReference) {
  const std::vector<float> whole = logits(ids_, 0, true);
  for (const int64_t chunk : {1, 2, 3, 4, 63, 64, 65, 127, 128, 129})
    ASSERT_TRUE(logits(ids_, chunk, true) == whole) << "chunk " << chunk;
}

TEST_P(States, PrefixesHaveTheBitsOfTheWhole) {
  const std::vector<float> whole = logits(ids_);
  for (const size_t length : {1, 2, 3, 4, 63, 64, 65, 127, 128, 129}) {
    const std::vector<float> prefix = logits({ids_.begin(), ids_.begin() + static_cast<long>(length)});
    ASSERT_FALSE(prefix.empty());
    EXPECT_TRUE(std::equal(prefix.begin(), prefix.end(), whole.begin())) << length;
  }
}

TEST_P(States, SequencesOfOneBatchDoNotSeeEachOther) {
  const std::vector<std::vector<int32_t>> prompts = {{ids_.begin(), ids_.begin() + 70},
                                                     {ids_.begin() + 50, ids_.begin() + 51},
                                                     {ids_.begin() + 9, ids_.begin() + 12},
                                                     ids_};
  const auto together = compute_batch_logits({folder(), flags_of("w4a16", false)}, prompts);
  ASSERT_TRUE(together.ok()) << together.status().to_string();
  std::vector<float> alone;
  for (const auto& ids : prompts) {
    const std::vector<float> part = logits(ids);
    alone.insert(alone.end(), part.begin(), part.end());
  }
  EXPECT_TRUE(*together == alone);
}

INSTANTIATE_TEST_SUITE_P(Families, States,
                         testing::Values("qwen3_next_h32_interleaved", "qwen3_5_h32_modelopt_mixed"),
                         [](const auto& test) { return std::string(test.param); });

// Latent attention splits its up-projections, so an FP4 up-projection is dequantised. This is exact: the
// tensor scale (here a power of two, which bf16 weights can represent too) is applied to the products.
class Fp4UpProjection : public testing::Test {
 protected:
  static constexpr const char* kSource = FP4MOE_FIXTURES "/dsv3_h96_modelopt_yarn";
  static constexpr float kTensorScale = 1.0f / 64;

  // Writes a copy of the fixture in which the kv_b_proj weights are FP4, or their dequantised values in bf16.
  static Status write_copy(const std::string& folder, bool is_fp4) {
    namespace fs = std::filesystem;
    fs::create_directories(folder);
    fs::copy(std::string(kSource) + "/config.json", folder + "/config.json",
             fs::copy_options::overwrite_existing);
    std::ofstream(folder + "/hf_quant_config.json")
        << R"({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head",
            "*.mlp.gate", "*.q_a_proj", "*.q_b_proj", "*.kv_a_proj_with_mqa", "*.o_proj")"
        << (is_fp4 ? "]}}" : R"(, "*.kv_b_proj"]}})");
    FP4MOE_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::open(kSource));
    std::vector<TensorSpec> specs;
    std::map<std::string, std::vector<uint8_t>> bytes;
    const auto add = [&](const std::string& name, DType dtype, std::vector<int64_t> shape, const void* data,
                         size_t n) {
      const auto* begin = static_cast<const uint8_t*>(data);
      bytes[name].assign(begin, begin + n);
      specs.push_back({name, dtype, std::move(shape)});
    };
    for (const TensorEntry& tensor : source.tensors()) {
      const TensorView& view = tensor.view;
      if (!tensor.name.ends_with("kv_b_proj.weight")) {
        add(tensor.name, view.dtype, view.shape, view.data, static_cast<size_t>(view.num_bytes()));
        continue;
      }
      const int64_t n = view.shape[0], k = view.shape[1];
      std::vector<uint8_t> codes(static_cast<size_t>(n * k / 2)), scales(static_cast<size_t>(n * k / 16));
      std::vector<bf16> weights(static_cast<size_t>(n * k));
      std::vector<float> row(static_cast<size_t>(k));
      for (int64_t r = 0; r < n; ++r) {
        uint8_t* row_codes = codes.data() + r * k / 2;
        uint8_t* row_scales = scales.data() + r * k / 16;
        nvfp4_quantize_row(view.as<bf16>() + r * k, k, EncodeScale{1 / kTensorScale}, row_codes, row_scales);
        nvfp4_dequantize_row(row_codes, row_scales, k, DecodeScale{kTensorScale}, row.data());
        for (int64_t c = 0; c < k; ++c)
          weights[static_cast<size_t>(r * k + c)] = float_to_bf16(row[static_cast<size_t>(c)]);
      }
      if (!is_fp4) {
        add(tensor.name, DType::kBF16, {n, k}, weights.data(), weights.size() * 2);
        continue;
      }
      add(tensor.name, DType::kU8, {n, k / 2}, codes.data(), codes.size());
      add(tensor.name + "_scale", DType::kF8E4M3, {n, k / 16}, scales.data(), scales.size());
      add(tensor.name + "_scale_2", DType::kF32, {}, &kTensorScale, sizeof kTensorScale);
    }
    return write_safetensors(
        folder + "/model.safetensors", specs,
        [&](const TensorSpec& spec, const ByteSink& sink) { return sink(bytes.at(spec.name)); });
  }
};

TEST_F(Fp4UpProjection, EqualsItsValuesInBf16) {
  const std::string folder = testing::TempDir() + "fp4moe_up_projection_" + std::to_string(::getpid());
  const std::vector<int32_t> ids = {5, 77, 3, 42, 8, 99, 1};
  for (const bool reference : {true, false}) {
    std::vector<std::vector<float>> logits;
    for (const bool is_fp4 : {true, false}) {
      const Status written = write_copy(folder + (is_fp4 ? "_fp4" : "_bf16"), is_fp4);
      ASSERT_TRUE(written.ok()) << written.to_string();
      const auto result =
          compute_logits({folder + (is_fp4 ? "_fp4" : "_bf16"), flags_of("w4a16", reference)}, ids);
      ASSERT_TRUE(result.ok()) << result.status().to_string();
      logits.push_back(*result);
    }
    EXPECT_EQ(logits[0], logits[1]) << "a factor that is a power of two must not round";
  }
  for (const char* kind : {"_fp4", "_bf16"}) std::filesystem::remove_all(folder + kind);
}

// The scales of an 8-bit KV cache, in a copy of a fixture.
class ScaledKvCache : public testing::TestWithParam<const char*> {
 protected:
  // Logits with these scales in every layer; 0: none.
  std::vector<float> logits(float k, float v, const char* kv_cache_dtype = "fp8_e4m3") const {
    const std::string folder = std::string(FP4MOE_FIXTURES "/") + GetParam();
    const ModelConfig config = load_model_config(folder).value();
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 30; ++i) ids.push_back((i * i * 7 + 3) % static_cast<int32_t>(config.vocab_size));
    const Checkpoint source = Checkpoint::open(folder).value();
    ChangedCheckpoint changed(source);
    for (int64_t layer = 0; layer < config.num_layers && k != 0; ++layer)
      for (const auto& [name, scale] : {std::pair{"k_proj.k_scale", k}, {"v_proj.v_scale", v}}) {
        const std::string full = "model.layers." + std::to_string(layer) + ".self_attn." + name;
        changed.add(full, DType::kF32, {});
        std::memcpy(changed.writable(full), &scale, sizeof scale);
      }
    const Checkpoint checkpoint = changed.make();
    LogitsRun run{folder, flags_of("w4a16", true)};
    run.flags.kv_cache_dtype = kv_cache_dtype;
    run.checkpoint = &checkpoint;
    const auto result = compute_logits(run, ids);
    EXPECT_TRUE(result.ok()) << result.status().to_string();
    return result.ok() ? *result : std::vector<float>{};
  }
};

// Scales that are powers of two move the codes' exponents: only the smallest values round differently. With
// scales that are too small, values saturate.
TEST_P(ScaledKvCache, ScalesApplyToStoresAndLoads) {
  const std::vector<float> plain = logits(0, 0);
  EXPECT_EQ(logits(1, 1), plain);
  const std::vector<float> scaled = logits(0x1p-3f, 0x1p-4f);
  EXPECT_TRUE(within_relative_l2(scaled, plain, 1e-2));
  EXPECT_NE(scaled, plain) << "smaller values have more bits";
  EXPECT_FALSE(within_relative_l2(logits(0x1p-14f, 0x1p-14f), plain, 5e-2));
}

TEST_P(ScaledKvCache, ScalesAreNotReadForOtherTypes) {
  EXPECT_EQ(logits(-1, 0.5f, "auto"), logits(0, 0, "auto"));
}

INSTANTIATE_TEST_SUITE_P(Families, ScaledKvCache,
                         testing::Values("h192_i96_yarn", "dsv3_h96_modelopt_yarn",
                                         "qwen3_h96_fused_old_rope"));

// `errors` is empty if something failed. run.folder: a demo with reference logits of the scheme.
Agreement run_demo(const LogitsRun& run, int prompt_number, const char* fp4_compute) {
  const std::string name = "prompt_" + std::to_string(prompt_number);
  const auto prompt = read_reference(run.folder + "/reference_logits.safetensors", name + ".input_ids",
                                     name + ".logits_" + fp4_compute);
  EXPECT_TRUE(prompt.ok()) << prompt.status().to_string();
  if (!prompt.ok()) return {};
  const auto logits = compute_logits(run, prompt->ids);
  EXPECT_TRUE(logits.ok()) << logits.status().to_string();
  return logits.ok() ? agreement(*logits, *prompt) : Agreement{};
}

class Demo : public testing::TestWithParam<int> {
 protected:
  Agreement run(const char* fp4_compute, bool reference, const char* kv_cache_dtype = "auto",
                const char* dense_quant = "none") const {
    LogitsRun run{FP4MOE_DSV3_DEMO, flags_of(fp4_compute, reference)};
    run.flags.kv_cache_dtype = kv_cache_dtype;
    run.flags.dense_quant = dense_quant;
    return run_demo(run, GetParam(), fp4_compute);
  }
};

TEST_P(Demo, ReferenceRunnerMatchesEveryPosition) {
  const Agreement a = run("w4a16", true);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.errors.back(), kFloat32Limit);
}

TEST_P(Demo, QuantisedActivationsMatchTheRule) {
  const Agreement a = run("w4a4", true);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.median(), kFloat32Limit);
  EXPECT_GE(a.within(1e-3), 0.75);
}

TEST_P(Demo, DefaultRunnerIsWithinItsPromise) {
  const Agreement a = run("w4a16", false);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.median(), 5e-3);
  EXPECT_LE(a.whole, 6e-2);
  EXPECT_GE(a.same_argmax, 0.985);
}

TEST_P(Demo, DefaultRunnerWithQuantisedActivationsIsWithinItsPromise) {
  const Agreement a = run("w4a4", false);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.median(), 6e-2);
}

// 8-bit latents and rotary keys change the logits by as much as docs/numerics.md states.
TEST_P(Demo, EightBitKvCacheIsWithinItsPromise) {
  for (const bool reference : {true, false}) {
    const Agreement a = run("w4a16", reference, "fp8_e4m3");
    ASSERT_FALSE(a.errors.empty());
    EXPECT_LE(a.median(), 2e-2);
    EXPECT_GE(a.median(), 2e-3) << "8-bit pages cannot be this close";
    EXPECT_GE(a.same_argmax, 0.98);
  }
}

// Dense weights in 8 bits change the logits by as much as docs/numerics.md states.
TEST_P(Demo, EightBitDenseWeightsAreWithinTheirPromise) {
  struct Promise {
    const char* quant;
    double least, most, same_argmax;
  };
  for (const Promise& promise : {Promise{"q8", 1e-3, 6e-3, 0.98}, {"fp8", 8e-3, 2e-2, 0.965}}) {
    const Agreement a = run("w4a16", false, "auto", promise.quant);
    ASSERT_FALSE(a.errors.empty());
    EXPECT_LE(a.median(), promise.most) << promise.quant;
    EXPECT_GE(a.median(), promise.least) << promise.quant << " cannot be this close";
    EXPECT_GE(a.same_argmax, promise.same_argmax) << promise.quant;
  }
}

// The sequences are long enough that latent attention computes the queries in several passes that split
// sequences.
class Batches : public testing::TestWithParam<const char*> {};

TEST_P(Batches, SequencesOfOneBatchDoNotSeeEachOther) {
  const auto prompt = read_reference(FP4MOE_DSV3_DEMO "/reference_logits.safetensors", "prompt_1.input_ids",
                                     "prompt_1.logits_w4a16");
  ASSERT_TRUE(prompt.ok());
  const std::vector<std::vector<int32_t>> prompts = {{prompt->ids.begin(), prompt->ids.begin() + 190},
                                                     {prompt->ids.begin() + 50, prompt->ids.begin() + 57},
                                                     {prompt->ids.begin() + 8, prompt->ids.end()}};
  LogitsRun run{FP4MOE_DSV3_DEMO, flags_of("w4a16", false)};
  run.flags.kv_cache_dtype = GetParam();
  const auto together = compute_batch_logits(run, prompts);
  ASSERT_TRUE(together.ok()) << together.status().to_string();
  std::vector<float> alone;
  for (const auto& ids : prompts) {
    const auto logits = compute_logits(run, ids);
    ASSERT_TRUE(logits.ok());
    alone.insert(alone.end(), logits->begin(), logits->end());
  }
  EXPECT_EQ(*together, alone);
}

INSTANTIATE_TEST_SUITE_P(KvCacheDtypes, Batches, testing::Values("auto", "fp8_e4m3"));

INSTANTIATE_TEST_SUITE_P(Prompts, Demo, testing::Values(0, 1));

class DeltaDemo : public testing::TestWithParam<int> {
 protected:
  Agreement run(bool reference, int64_t chunk) const {
    return run_demo({FP4MOE_DELTA_DEMO, flags_of("w4a16", reference), chunk}, GetParam(), "w4a16");
  }
};

TEST_P(DeltaDemo, ReferenceRunnerMatchesTheLastPositions) {
  for (const int64_t chunk : {0, 50}) {
    const Agreement a = run(true, chunk);
    ASSERT_EQ(a.errors.size(), 60u);
    EXPECT_LE(a.errors.back(), kFloat32Limit) << chunk;
  }
}

TEST_P(DeltaDemo, DefaultRunnerIsWithinItsPromise) {
  const Agreement a = run(false, 0);
  ASSERT_EQ(a.errors.size(), 60u);
  EXPECT_LE(a.median(), 5e-3);
  EXPECT_LE(a.whole, 6e-2);
  EXPECT_GE(a.same_argmax, 0.985);
}

INSTANTIATE_TEST_SUITE_P(Prompts, DeltaDemo, testing::Values(0, 1));

}  // namespace
}  // namespace fp4moe
