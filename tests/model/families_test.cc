// deepseek_v3, qwen3_moe and qwen2_moe against the stock Hugging Face classes: random checkpoints in native
// FP4 dialects (make_moe_fixtures.py) and the second demo.
#include <gtest/gtest.h>

#include <algorithm>

#include "reference_prompt.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr double kFloat32Limit = 1e-4;  // every position; measured below 3e-6

EngineConfig flags_of(const char* fp4_compute, bool reference) {
  EngineConfig flags;
  flags.fp4_compute = fp4_compute;
  flags.threads = 2;
  if (!reference) return flags;
  flags.dtype = "float32";
  flags.moe_runner_backend = "ref";
  return flags;
}

// Relative L2 errors of the positions, ascending, and how many have the reference's argmax.
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
  const size_t v = prompt.logits.size() / prompt.ids.size();
  for (size_t r = 0; r < prompt.ids.size(); ++r) {
    const auto actual = std::span(logits).subspan(r * v, v),
               expected = std::span(prompt.logits).subspan(r * v, v);
    a.errors.push_back(relative_l2(actual, expected));
    const bool same = std::max_element(actual.begin(), actual.end()) - actual.begin() ==
                      std::max_element(expected.begin(), expected.end()) - expected.begin();
    a.same_argmax += static_cast<double>(same) / static_cast<double>(prompt.ids.size());
  }
  std::sort(a.errors.begin(), a.errors.end());
  a.whole = relative_l2(logits, prompt.logits);
  return a;
}

struct Case {
  const char* name;
  bool has_w4a4;
};

class Fixture : public testing::TestWithParam<Case> {
 protected:
  std::string folder() const { return std::string(FP4MOE_FIXTURES "/") + GetParam().name; }
  // Empty errors where something failed.
  Agreement run(const char* fp4_compute, bool reference) const {
    const auto prompt =
        read_reference(folder() + "/expected.safetensors", "ids", std::string("logits_") + fp4_compute);
    EXPECT_TRUE(prompt.ok()) << prompt.status().to_string();
    if (!prompt.ok()) return {};
    const auto logits = compute_logits({folder(), flags_of(fp4_compute, reference)}, prompt->ids);
    EXPECT_TRUE(logits.ok()) << logits.status().to_string();
    return logits.ok() ? agreement(*logits, *prompt) : Agreement{};
  }
};

TEST_P(Fixture, ReferenceRunnerMatchesStockClass) {
  const Agreement a = run("w4a16", true);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.errors.back(), kFloat32Limit);
}

// A rounding tie may flip a code, which moves the positions after it.
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

// Random weights amplify the rounding of activations to bf16 more than trained ones; it must show, and stay
// small.
TEST_P(Fixture, DefaultRunnerIsNearTheStockClass) {
  const Agreement a = run("w4a16", false);
  ASSERT_FALSE(a.errors.empty());
  EXPECT_LE(a.whole, 2e-2);
  EXPECT_GE(a.whole, 1e-6) << "bf16 activations cannot be this near";
}

TEST_P(Fixture, ChunksPagesAndThreadsChangeNoBit) {
  std::vector<int32_t> ids(19);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 37 % 97);
  for (const char* compute : {"w4a16", "w4a8"}) {
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

INSTANTIATE_TEST_SUITE_P(Families, Fixture,
                         testing::Values(Case{"dsv3_h96_modelopt_yarn", true},
                                         Case{"dsv3_h64_compressed_sharded", true},
                                         Case{"qwen3_h96_fused_old_rope", true},
                                         Case{"qwen3_h96_compressed_mxfp4_tied", false},
                                         Case{"qwen2_h64_shared_expert", true}),
                         [](const auto& test) { return std::string(test.param.name); });

class Demo : public testing::TestWithParam<int> {
 protected:
  Agreement run(const char* fp4_compute, bool reference) const {
    const std::string name = "prompt_" + std::to_string(GetParam());
    const auto prompt = read_reference(FP4MOE_DSV3_DEMO "/reference_logits.safetensors", name + ".input_ids",
                                       name + ".logits_" + fp4_compute);
    EXPECT_TRUE(prompt.ok()) << prompt.status().to_string();
    if (!prompt.ok()) return {};
    const auto logits = compute_logits({FP4MOE_DSV3_DEMO, flags_of(fp4_compute, reference)}, prompt->ids);
    EXPECT_TRUE(logits.ok()) << logits.status().to_string();
    return logits.ok() ? agreement(*logits, *prompt) : Agreement{};
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

INSTANTIATE_TEST_SUITE_P(Prompts, Demo, testing::Values(0, 1));

}  // namespace
}  // namespace fp4moe
