// Passes over so many rows that the ranks of a group share them: each keeps the residual of some rows, norms
// and routes only these. The demo checkpoints on several ranks against one rank.
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <random>
#include <string>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/ranks/growing.h"
#include "engine/ranks/set_layout.h"
#include "engine/trained_drafts.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = setenv("FP4MOE_RANKS_PER_GPU", "8", 0) == 0;

constexpr RankGroupOptions kManyRows{
    .max_batch_tokens = 1024, .max_logit_rows = 8, .num_kv_pages = 24, .wants_logits = true};
constexpr int64_t kLengths[] = {371, 301, 352};  // 1024 rows

struct Case {
  const char* model;
  int tp = 1, ep = 1, dp = 1;
  const char* scheme = "auto";
  const char* reduce_dtype = "float32";
  const char* a2a = "none";
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = std::string(c.model) + "_tp" + std::to_string(c.tp) + "_ep" + std::to_string(c.ep) +
                     "_dp" + std::to_string(c.dp) + "_" + c.scheme + "_" + c.reduce_dtype;
  std::ranges::replace(name, '-', '_');
  return name;
}

constexpr Case kCases[] = {
    {"demo-gptoss-mxfp4", 2},
    {"demo-gptoss-mxfp4", 4, 4},
    {"demo-gptoss-mxfp4", 2, 1, 1, "w4a8"},
    {"demo-gptoss-mxfp4", 2, 1, 1, "auto", "bfloat16"},
    {"demo-gptoss-mxfp4", 4, 1, 2},
    {"demo-gptoss-mxfp4", 8, 8, 2},
    {"demo-dsv3-nvfp4", 2},
    {"demo-dsv3-nvfp4", 4},
    {"demo-dsv3-nvfp4", 4, 4, 1, "auto", "bfloat16"},
    {"demo-dsv3-nvfp4", 2, 2, 1, "w4a8"},
    {"demo-qwen35-nvfp4", 2},  // the shared expert's gate needs all rows, so the ranks do not share them
};

class GpuRowShares : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const int last = gpu_of_rank(GetParam().tp - 1);
    if (!device_info(last).ok())
      GTEST_SKIP() << "tp=" << GetParam().tp << " at " << ranks_per_gpu() << " ranks per GPU needs GPU "
                   << last;
    std::mt19937 random(3);
    for (const int64_t length : kLengths) {
      auto& prompt = prompts_.emplace_back();
      for (int64_t i = 0; i < length; ++i) prompt.push_back(static_cast<int32_t>(random() % 250));
    }
  }
  static EngineConfig flags(const Case& layout) {
    EngineConfig flags;
    flags.device = "cuda";
    flags.page_size = 64;  // kPagesEach pages have room for each prompt
    flags.fp4_compute = GetParam().scheme;
    flags.comm_timeout = 20;
    flags.tp_reduce_dtype = layout.reduce_dtype;
    set_layout(flags, layout);
    return flags;
  }
  static Case one_rank() { return {.model = GetParam().model}; }

  std::vector<std::vector<int32_t>> prompts_;
};
INSTANTIATE_TEST_SUITE_P(Layouts, GpuRowShares, testing::ValuesIn(kCases), case_name);

// The logits of the prompts and of the tokens that follow them, which read all of the prompts' keys and
// values.
TEST_P(GpuRowShares, GiveTheLogitsOfOneRank) {
  Growing one(GetParam().model, flags(one_rank()), kManyRows);
  Growing group(GetParam().model, flags(GetParam()), kManyRows);
  const bool is_exact =
      std::string(GetParam().scheme) == "auto" && std::string(GetParam().reduce_dtype) == "float32";
  Logits expected = one.step(prompts_), actual = group.step(prompts_);
  for (int i = 0; i < 4; ++i) {
    const std::vector<double> errors = sorted_errors(actual, expected);
    EXPECT_LT(errors[1], is_exact ? 2e-2 : 8e-2) << "step " << i;
    EXPECT_LT(errors[2], 1.0) << "step " << i;
    const auto next = best_of(expected);
    expected = one.step(next);
    actual = group.step(next);
  }
}

// Each row is counted once, and its experts are reported as they are counted.
TEST_P(GpuRowShares, CountEachRowOnce) {
  if (GetParam().dp > 1) GTEST_SKIP() << "experts are reported for one group only";
  Growing group(GetParam().model, flags(GetParam()), kManyRows);
  group.wants_experts = true;
  const ExpertLoad before = group.ranks().expert_load();
  group.step(prompts_);
  const ExpertLoad after = group.ranks().expert_load();
  const int64_t k = group.config().top_k,
                rows = std::accumulate(std::begin(kLengths), std::end(kLengths), int64_t{0});
  std::vector<int64_t> counts(after.tokens.size());
  for (size_t i = 0; i < after.layers.size(); ++i) {
    const int64_t layer = after.layers[i], filled = layer + 1 < group.config().num_layers ? rows : 3;
    for (int64_t place = 0; place < filled * k; ++place) {
      const int32_t id = group.experts()[static_cast<size_t>(layer * rows * k + place)];
      ASSERT_GE(id, 0) << "layer " << layer << ", " << place;
      ++counts[i * static_cast<size_t>(after.num_experts) + static_cast<size_t>(id)];
    }
  }
  for (size_t i = 0; i < counts.size(); ++i) EXPECT_EQ(counts[i], after.tokens[i] - before.tokens[i]) << i;
}

// Draft models read features of the prompts' rows, which are residuals of layers in between and the last
// norm.
class GpuRowShareDrafts : public testing::TestWithParam<TrainedDraft> {};
INSTANTIATE_TEST_SUITE_P(Demos, GpuRowShareDrafts, testing::ValuesIn(kTrainedDrafts), trained_name);

TEST_P(GpuRowShareDrafts, AreAsOftenRightAsOnOneRank) {
  if (!device_info(gpu_of_rank(1)).ok()) GTEST_SKIP() << "needs GPU " << gpu_of_rank(1);
  const std::vector<float> temperatures(6, 0.0f);  // copies of each prompt
  double lengths[2];
  for (const int tp : {1, 2}) {
    EngineConfig config = config_of(GetParam().model);
    set_layout(config, Case{.model = GetParam().model, .tp = tp});
    config.device = "cuda";
    config.comm_timeout = 20;
    config.disable_radix_cache = true;
    config.max_running_requests = 64;
    config.max_total_tokens = 16384;
    lengths[tp - 1] = run_examples(with_trained_drafts(config, GetParam()), GetParam(), temperatures)
                          .stats.spec_accept_length();
  }
  std::printf("acceptance length %.3f on one rank, %.3f on two\n", lengths[0], lengths[1]);
  EXPECT_GE(lengths[0], 2.0);
  EXPECT_NEAR(lengths[1], lengths[0], 0.1);
}

}  // namespace
}  // namespace fp4moe
