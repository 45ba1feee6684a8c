#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "reference_prompt.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr double kFloat32Limit = 1e-4;  // both sides sum in different orders; measured below 1e-6
constexpr double kDefaultLimit = 2e-2;  // docs/numerics.md: a whole prompt with bf16 activations

EngineConfig reference_flags() {
  EngineConfig flags;
  flags.dtype = "float32";
  flags.moe_runner_backend = "ref";
  flags.threads = 2;
  return flags;
}

std::span<const float> row(const std::vector<float>& logits, size_t r, size_t v) {
  return std::span<const float>(logits).subspan(r * v, v);
}

size_t argmax(std::span<const float> x) {
  return static_cast<size_t>(std::max_element(x.begin(), x.end()) - x.begin());
}

// Float32 logits of the stock Hugging Face class for random checkpoints (make_gptoss_fixtures.py): odd sizes,
// shards, both rope spellings, windows shorter than the prompt.
class Fixture : public testing::TestWithParam<const char*> {};

TEST_P(Fixture, ReferenceRunnerMatchesStockClass) {
  const std::string folder = std::string(FP4MOE_FIXTURES "/") + GetParam();
  const Result<ReferencePrompt> prompt =
      read_reference(folder + "/reference.safetensors", "input_ids", "logits");
  ASSERT_TRUE(prompt.ok()) << prompt.status().to_string();
  const Result<std::vector<float>> logits = compute_logits({folder, reference_flags()}, prompt->ids);
  ASSERT_TRUE(logits.ok()) << logits.status().to_string();
  EXPECT_TRUE(within_relative_l2(*logits, prompt->logits, kFloat32Limit));
}

// The default mode rounds every GEMM input to bf16: it is close to the reference, but not equal.
TEST_P(Fixture, DefaultRunnerIsNearTheStockClass) {
  const std::string folder = std::string(FP4MOE_FIXTURES "/") + GetParam();
  const Result<ReferencePrompt> prompt =
      read_reference(folder + "/reference.safetensors", "input_ids", "logits");
  ASSERT_TRUE(prompt.ok()) << prompt.status().to_string();
  const Result<std::vector<float>> logits = compute_logits({folder, EngineConfig{}}, prompt->ids);
  ASSERT_TRUE(logits.ok()) << logits.status().to_string();
  EXPECT_TRUE(within_relative_l2(*logits, prompt->logits, kDefaultLimit));
  EXPECT_FALSE(within_relative_l2(*logits, prompt->logits, 1e-6)) << "bf16 activations cannot be this close";
}

INSTANTIATE_TEST_SUITE_P(Gpt, Fixture,
                         testing::Values("h192_i96_yarn", "h160_i224_sharded_old_rope",
                                         "h96_i32_plain_rope_top1"));

class Demo : public testing::TestWithParam<int> {
 protected:
  Demo() {
    const std::string name = "prompt_" + std::to_string(GetParam());
    Result<ReferencePrompt> prompt = read_reference(FP4MOE_DEMO "/reference_logits.safetensors",
                                                    name + ".input_ids", name + ".logits_w4a16");
    if (prompt.ok()) prompt_ = std::move(*prompt);
    vocab_size_ = prompt_.logits.size() / std::max<size_t>(1, prompt_.ids.size());
  }

  // The share of positions with the reference's argmax, and the median of the positions' relative L2 errors.
  std::pair<double, double> agreement(const std::vector<float>& logits) const {
    std::vector<double> errors;
    double same = 0;
    for (size_t r = 0; r < prompt_.ids.size(); ++r) {
      const auto actual = row(logits, r, vocab_size_), expected = row(prompt_.logits, r, vocab_size_);
      errors.push_back(relative_l2(actual, expected));
      same += argmax(actual) == argmax(expected);
    }
    std::nth_element(errors.begin(), errors.begin() + static_cast<long>(errors.size() / 2), errors.end());
    return {same / static_cast<double>(errors.size()), errors[errors.size() / 2]};
  }

  ReferencePrompt prompt_;
  size_t vocab_size_ = 0;
};

TEST_P(Demo, ReferenceRunnerMatchesEveryArgmax) {
  ASSERT_FALSE(prompt_.ids.empty());
  const Result<std::vector<float>> logits = compute_logits({FP4MOE_DEMO, reference_flags()}, prompt_.ids);
  ASSERT_TRUE(logits.ok()) << logits.status().to_string();
  EXPECT_TRUE(within_relative_l2(*logits, prompt_.logits, kFloat32Limit));
  EXPECT_EQ(agreement(*logits).first, 1.0);
}

TEST_P(Demo, DefaultRunnerIsWithinItsPromise) {
  ASSERT_FALSE(prompt_.ids.empty());
  const Result<std::vector<float>> logits = compute_logits({FP4MOE_DEMO, EngineConfig{}}, prompt_.ids);
  ASSERT_TRUE(logits.ok()) << logits.status().to_string();
  EXPECT_TRUE(within_relative_l2(*logits, prompt_.logits, kDefaultLimit));
  const auto [same_argmax, median_error] = agreement(*logits);
  EXPECT_GE(same_argmax, 0.99);
  EXPECT_LE(median_error, 5e-3);
}

TEST_P(Demo, LogitsDoNotDependOnChunksPagesOrThreads) {
  ASSERT_FALSE(prompt_.ids.empty());
  const Result<std::vector<float>> whole = compute_logits({FP4MOE_DEMO, EngineConfig{}}, prompt_.ids);
  ASSERT_TRUE(whole.ok()) << whole.status().to_string();
  for (const int64_t chunk : {1, 7, 64}) {
    LogitsRun run{FP4MOE_DEMO, EngineConfig{}, chunk, static_cast<int>(chunk % 5 + 1)};
    run.flags.threads = static_cast<int>(chunk % 4 + 1);
    const Result<std::vector<float>> parts = compute_logits(run, prompt_.ids);
    ASSERT_TRUE(parts.ok()) << parts.status().to_string();
    EXPECT_EQ(*parts, *whole) << "chunk " << chunk;
  }
}

// 8-bit dense weights change the logits by as much as docs/numerics.md states, also with bf16 activations.
TEST_P(Demo, EightBitDenseLayersAreWithinTheirPromise) {
  ASSERT_FALSE(prompt_.ids.empty());
  struct Promise {
    const char* quant;
    double same_argmax, median_error;
  };
  for (const Promise& promise : {Promise{"q8", 0.98, 5e-3}, {"fp8", 0.97, 2e-2}})
    for (EngineConfig flags : {reference_flags(), EngineConfig{}}) {
      flags.dense_quant = promise.quant;
      const Result<std::vector<float>> logits = compute_logits({FP4MOE_DEMO, flags}, prompt_.ids);
      ASSERT_TRUE(logits.ok()) << logits.status().to_string();
      const auto [same_argmax, median_error] = agreement(*logits);
      EXPECT_GE(same_argmax, promise.same_argmax) << promise.quant;
      EXPECT_LE(median_error, promise.median_error) << promise.quant;
      EXPECT_FALSE(within_relative_l2(*logits, prompt_.logits, 1e-3)) << "8-bit weights cannot be this close";
    }
}

TEST_P(Demo, EightBitLogitsDoNotDependOnChunksOrThreads) {
  ASSERT_FALSE(prompt_.ids.empty());
  LogitsRun run{FP4MOE_DEMO, EngineConfig{}};
  for (const char* quant : {"q8", "fp8"}) {
    run.flags.dense_quant = quant;
    run.chunk = LogitsRun().chunk;
    const Result<std::vector<float>> whole = compute_logits(run, prompt_.ids);
    ASSERT_TRUE(whole.ok()) << whole.status().to_string();
    for (const int64_t chunk : {1, 7}) {
      run.chunk = chunk;
      run.flags.threads = static_cast<int>(chunk % 3 + 1);
      const Result<std::vector<float>> parts = compute_logits(run, prompt_.ids);
      ASSERT_TRUE(parts.ok()) << parts.status().to_string();
      EXPECT_EQ(*parts, *whole) << quant << " chunk " << chunk;
    }
  }
}

// An 8-bit KV cache changes the logits by as much as docs/numerics.md states.
TEST_P(Demo, EightBitKvCacheIsWithinItsPromise) {
  ASSERT_FALSE(prompt_.ids.empty());
  for (EngineConfig flags : {reference_flags(), EngineConfig{}}) {
    flags.kv_cache_dtype = "fp8_e4m3";
    const Result<std::vector<float>> logits = compute_logits({FP4MOE_DEMO, flags}, prompt_.ids);
    ASSERT_TRUE(logits.ok()) << logits.status().to_string();
    const auto [same_argmax, median_error] = agreement(*logits);
    EXPECT_GE(same_argmax, 0.98);
    EXPECT_LE(median_error, 1e-2);
    EXPECT_FALSE(within_relative_l2(*logits, prompt_.logits, 1e-3)) << "8-bit pages cannot be this close";
  }
}

// New tokens attend to their own codes, so a prompt gives the same bits however it is cut into steps; reusing
// a cached prefix is one such cut.
TEST_P(Demo, LogitsOverAnEightBitKvCacheDoNotDependOnChunksPagesOrThreads) {
  ASSERT_FALSE(prompt_.ids.empty());
  LogitsRun run{FP4MOE_DEMO, EngineConfig{}};
  run.flags.kv_cache_dtype = "fp8_e4m3";
  const Result<std::vector<float>> whole = compute_logits(run, prompt_.ids);
  ASSERT_TRUE(whole.ok()) << whole.status().to_string();
  for (const int64_t chunk : {1, 7, 64}) {
    run.chunk = chunk, run.page_size = static_cast<int>(chunk % 5 + 1);
    run.flags.threads = static_cast<int>(chunk % 4 + 1);
    const Result<std::vector<float>> parts = compute_logits(run, prompt_.ids);
    ASSERT_TRUE(parts.ok()) << parts.status().to_string();
    EXPECT_EQ(*parts, *whole) << "chunk " << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Prompts, Demo, testing::Values(0, 1));

}  // namespace
}  // namespace fp4moe
