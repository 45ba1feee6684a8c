// Both demo checkpoints on several ranks that share one GPU or have one each: tensor and expert parallelism
// against one rank, recorded against launched steps, and refused combinations.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/demo_engine.h"
#include "engine/ranks/growing_drafts.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/make_tiny.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads it. A value from outside stays: with the one that
// scripts/gpu_test --gpus sets, the ranks are on different GPUs.
const bool environment_is_set = setenv("FP4MOE_RANKS_PER_GPU", "8", 0) == 0;

constexpr const char* kGptOss = "demo-gptoss-mxfp4";
constexpr const char* kDeepSeek = "demo-dsv3-nvfp4";

struct Case {
  const char* model;
  int tp = 1, ep = 1;
  const char* a2a = "none";
  const char* scheme = "auto";
  int64_t a2a_budget = 0;  // bytes; 0: the default
  int dp = 1;
  const char* rows = "auto";     // format of the rows that the a2a sends
  const char* results = "auto";  // format of flashinfer's results
  bool deterministic = false;
  const char* dense_quant = "none";
  bool dp_lm_head = false;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = std::string(c.model) + "_tp" + std::to_string(c.tp) + "_ep" + std::to_string(c.ep) +
                     "_" + c.a2a + "_" + c.scheme + (c.a2a_budget > 0 ? "_rounds" : "") +
                     (c.dp > 1 ? "_dp" + std::to_string(c.dp) : "");
  if (c.dp_lm_head) name += "_heads";
  if (std::string(c.rows) != "auto") name += std::string("_") + c.rows;
  if (std::string(c.dense_quant) != "none") name += std::string("_") + c.dense_quant;
  if (std::string(c.results) != "auto") name += std::string("_results_") + c.results;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

EngineConfig flags_of(const Case& c, bool graphs) {
  EngineConfig flags;
  flags.device = "cuda";
  flags.tp_size = c.tp;
  flags.ep_size = c.ep;
  flags.dp_size = c.dp;
  flags.enable_dp_attention = c.dp > 1;
  flags.enable_dp_lm_head = c.dp_lm_head;
  flags.moe_a2a_backend = c.a2a;
  flags.fp4_compute = c.scheme;
  flags.dense_quant = c.dense_quant;
  (std::string(c.a2a) == "deepep" ? flags.deepep_dispatcher_output_dtype
                                  : flags.flashinfer_dispatcher_output_dtype) = c.rows;
  flags.flashinfer_combine_dtype = c.results;
  flags.enable_deterministic_inference = c.deterministic;
  if (c.a2a_budget > 0) flags.a2a_memory_budget = c.a2a_budget;
  flags.disable_cuda_graph = !graphs;
  flags.comm_timeout = 20;
  return flags;
}

constexpr Case kCases[] = {
    {kGptOss, 2, 1},
    {kGptOss, 2, 2},
    {kGptOss, 4, 1},
    {kGptOss, 4, 4},
    {kDeepSeek, 2, 1},
    {kDeepSeek, 2, 2},
    {kDeepSeek, 4, 1},
    {kDeepSeek, 4, 4},
    {kGptOss, 2, 2, "deepep"},
    {kGptOss, 4, 4, "flashinfer"},
    {kGptOss, 4, 4, "deepep", "w4a8"},
    {kGptOss, 2, 2, "flashinfer", "w4a8"},
    {kDeepSeek, 4, 4, "deepep"},
    {kDeepSeek, 2, 2, "flashinfer"},
    {kDeepSeek, 2, 2, "deepep", "w4a4"},
    {kDeepSeek, 4, 4, "flashinfer", "w4a4"},
    {kDeepSeek, 4, 4, "flashinfer", "w4a8"},
    {kDeepSeek, 4, 4, "deepep", "auto", 64 << 10},
    {kGptOss, 2, 2, "flashinfer", "auto", 64 << 10},
    {kGptOss, 2, 1, "none", "auto", 0, 2},
    {kGptOss, 4, 4, "none", "auto", 0, 2},
    {kGptOss, 4, 4, "deepep", "auto", 0, 4},
    {kGptOss, 4, 4, "flashinfer", "w4a8", 0, 4},
    {kDeepSeek, 2, 2, "deepep", "auto", 0, 2},
    {kDeepSeek, 4, 4, "deepep", "auto", 64 << 10, 2},
    {kDeepSeek, 4, 1, "none", "auto", 0, 4},
    {kDeepSeek, 4, 4, "flashinfer", "w4a4", 0, 4},
    {kGptOss, 2, 2, "deepep", "auto", 0, 1, "fp8"},
    {kDeepSeek, 4, 4, "deepep", "w4a8", 0, 2, "fp8"},
    {kDeepSeek, 2, 2, "deepep", "auto", 0, 1, "nvfp4"},
    {kDeepSeek, 4, 4, "deepep", "w4a4", 0, 1, "nvfp4"},
    {kGptOss, 4, 4, "flashinfer", "auto", 0, 4, "nvfp4", "fp8"},
    {kDeepSeek, 2, 1, "none", "w4a4", 0, 2},
    {kGptOss, 8, 8, "flashinfer", "auto", 0, 8},
    {kDeepSeek, 8, 8, "deepep", "auto", 0, 4},
    {.model = kGptOss, .tp = 2, .ep = 2, .a2a = "flashinfer", .dp = 2, .dp_lm_head = true},
    {.model = kDeepSeek, .tp = 2, .ep = 2, .a2a = "deepep", .dp = 2, .dp_lm_head = true},
};
// Fixture of tests whose parameter is the layout.
class GpuLayouts : public testing::TestWithParam<Case> {
  void SetUp() override {
    const int last = gpu_of_rank(GetParam().tp - 1);
    if (!device_info(last).ok())
      GTEST_SKIP() << "tp=" << GetParam().tp << " at " << ranks_per_gpu() << " ranks per GPU needs GPU "
                   << last;
  }
};

bool rows_lose_bits(const Case& c) {
  return std::string(c.rows) != "auto" && std::string(c.scheme) != "w4a4";
}
class GpuGroups : public GpuLayouts {};
INSTANTIATE_TEST_SUITE_P(Layouts, GpuGroups, testing::ValuesIn(kCases), case_name);

// most: of the median error of the sequences.
void expect_what_one_rank_computes(const std::string& model, const Case& c, double most) {
  Growing one(model, flags_of({.model = c.model, .scheme = c.scheme}, true)), group(model, flags_of(c, true));
  Logits expected = one.step(kPrompts), actual = group.step(kPrompts);
  for (int i = 0; i < 8; ++i) {
    const std::vector<double> errors = sorted_errors(actual, expected);
    EXPECT_LT(errors[1], most) << "step " << i;
    EXPECT_LT(errors[2], 1.0) << "step " << i;
    const auto next = best_of(expected);
    expected = one.step(next);
    actual = group.step(next);
  }
}

TEST_P(GpuGroups, ComputeWhatOneRankComputes) {
  // If sums differ in the last bits, quantised activations can have other codes.
  const double most = rows_lose_bits(GetParam())                 ? 0.25
                      : std::string(GetParam().scheme) == "auto" ? 2e-2
                                                                 : 8e-2;
  expect_what_one_rank_computes(GetParam().model, GetParam(), most);
}

// The router's weights are too large for the launch that norms, routes and sends two rows; DeepSeek-V3's are
// for one. With a rank on each GPU, the rows go in direct rounds.
TEST(GpuGroupRouters, OfManyExpertsSendRowsInALaunchOfTheirOwn) {
  if (!device_info(gpu_of_rank(1)).ok()) GTEST_SKIP() << "needs GPU " << gpu_of_rank(1);
  const TempFolder folder;
  MakeTinyOptions options{.like = "gpt-oss-tiny"};
  options.num_hidden_layers = 2;
  options.hidden_size = 3328;
  options.intermediate_size = 64;
  options.num_experts = 256;
  ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
  expect_what_one_rank_computes(folder.path(), {kGptOss, 2, 2, "flashinfer", "auto", 0, 2}, 2e-2);
}

TEST_P(GpuGroups, RecordedStepsHaveTheBitsOfLaunchedOnes) {
  Growing recorded(GetParam().model, flags_of(GetParam(), true)),
      launched(GetParam().model, flags_of(GetParam(), false));
  Logits a = recorded.step(kPrompts), b = launched.step(kPrompts);
  for (int i = 0; i < 6; ++i) {
    ASSERT_EQ(a, b) << "step " << i;
    const auto next = best_of(a);
    a = recorded.step(next);
    b = launched.step(next);
  }
}

TEST_P(GpuGroups, RecordedStepsThatVerifyDraftsHaveTheBitsOfLaunchedOnes) {
  Growing recorded(GetParam().model, with_drafts(flags_of(GetParam(), true))),
      launched(GetParam().model, with_drafts(flags_of(GetParam(), false)));
  expect_equal_bits_with_drafts(recorded, launched);
}

// w4a4 quantises a row exactly as its source rank does before it sends the row.
class GpuNvfp4Rows : public GpuLayouts {};
INSTANTIATE_TEST_SUITE_P(Layouts, GpuNvfp4Rows,
                         testing::Values(Case{kDeepSeek, 2, 2, "deepep", "w4a4", 0, 2, "nvfp4"},
                                         Case{kDeepSeek, 4, 4, "deepep", "w4a4", 0, 2, "nvfp4"}),
                         case_name);
TEST_P(GpuNvfp4Rows, LoseNothingInW4a4) {
  Case sent = GetParam(), plain = sent;
  plain.rows = "bf16";
  Growing a(sent.model, flags_of(sent, true)), b(plain.model, flags_of(plain, true));
  Logits from_nvfp4 = a.step(kPrompts), from_bf16 = b.step(kPrompts);
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(from_nvfp4, from_bf16) << "step " << i;
    const auto next = best_of(from_bf16);
    from_nvfp4 = a.step(next);
    from_bf16 = b.step(next);
  }
}

constexpr Case kDeterministicCases[] = {
    {kGptOss, 2, 1},
    {kGptOss, 4, 4, "none", "w4a8"},
    {kGptOss, 4, 4, "deepep", "auto", 0, 2},
    {kGptOss, 2, 2, "flashinfer", "auto", 0, 2},
    {kDeepSeek, 4, 1},
    {kDeepSeek, 2, 2, "none", "w4a4"},
    {kDeepSeek, 4, 4, "deepep", "w4a8", 0, 4},
    {kDeepSeek, 4, 4, "deepep", "w4a4", 64 << 10, 2},
    {kDeepSeek, 4, 4, "flashinfer", "w4a4", 0, 4},
    {kDeepSeek, 4, 4, "none", "auto", 0, 2},
    {.model = kGptOss, .tp = 2, .dense_quant = "fp8"},
    {.model = kDeepSeek, .tp = 4, .ep = 4, .a2a = "deepep", .dp = 2, .dense_quant = "fp8"},
    {kGptOss, 8, 8, "none", "auto", 0, 2},
    {kGptOss, 8, 8, "deepep", "w4a8", 0, 8},
    {kDeepSeek, 8, 8, "flashinfer", "auto", 0, 8},
    {kDeepSeek, 8, 8, "deepep", "w4a4", 0, 4},
};
class DeterministicGpuGroups : public GpuLayouts {};
INSTANTIATE_TEST_SUITE_P(Layouts, DeterministicGpuGroups, testing::ValuesIn(kDeterministicCases), case_name);

TEST_P(DeterministicGpuGroups, HaveTheBitsOfOneRank) {
  Case layout = GetParam(), alone{.model = layout.model, .scheme = layout.scheme};
  alone.dense_quant = layout.dense_quant;
  layout.deterministic = alone.deterministic = true;
  Growing one(alone.model, flags_of(alone, true)), group(layout.model, flags_of(layout, true));
  Logits expected = one.step(kPrompts), actual = group.step(kPrompts);
  for (int i = 0; i < 8; ++i) {
    ASSERT_EQ(actual, expected) << "step " << i;
    const auto next = best_of(expected);
    expected = one.step(next);
    actual = group.step(next);
  }
}

// Some drafts are right and some are wrong; the steps are recorded, or launched kernel by kernel.
TEST_P(DeterministicGpuGroups, VerifyDraftsWithTheBitsOfPlainDecoding) {
  Case layout = GetParam(), alone{.model = layout.model, .scheme = layout.scheme};
  alone.dense_quant = layout.dense_quant;
  layout.deterministic = alone.deterministic = true;
  for (const bool graphs : {true, false}) {
    Growing drafted(layout.model, with_drafts(flags_of(layout, graphs))),
        one(alone.model, flags_of(alone, true));
    compare_with_plain(
        drafted, one, [](const auto& a, const auto& b, const std::string& what) { EXPECT_EQ(a, b) << what; });
  }
}

constexpr Case kGreedyCases[] = {
    {kGptOss, 2, 1},
    {kDeepSeek, 4, 4, "deepep"},
    {kGptOss, 4, 4, "none", "auto", 0, 2},
    {kDeepSeek, 8, 8, "deepep", "auto", 0, 4},
    {kGptOss, 2, 2, "flashinfer", "auto", 0, 2},
    {.model = kDeepSeek, .tp = 4, .ep = 4, .a2a = "deepep", .dp = 2, .dp_lm_head = true},
};
class GpuGroupTokens : public GpuLayouts {};
INSTANTIATE_TEST_SUITE_P(Layouts, GpuGroupTokens, testing::ValuesIn(kGreedyCases), case_name);

// Greedy rows alone are chosen from each rank's logits; beside a row with a log-probability, perhaps of
// another group, all logits are gathered. Masked ids are those that would be best otherwise.
TEST_P(GpuGroupTokens, AreTheBestOfTheLogits) {
  for (const bool graphs : {true, false}) {
    Growing model(GetParam().model, flags_of(GetParam(), graphs));
    const std::vector<std::vector<int32_t>> best_ids = best_of(model.step(kPrompts));
    ASSERT_TRUE(model.ranks().set_masked_ids(std::vector{best_ids[0][0], best_ids[1][0]}).ok());
    std::vector<std::vector<int32_t>> next = {{5}, {6}, {7}};
    for (int i = 0; i < 6; ++i) {
      Logits logits = model.step(next);
      for (std::vector<float>& row : logits)
        for (const size_t s : {size_t{0}, size_t{1}}) row[static_cast<size_t>(best_ids[s][0])] = -1e30f;
      next = best_of(logits);
      std::vector<size_t> order;  // the sequence of each row
      for (size_t g = 0; g < static_cast<size_t>(GetParam().dp); ++g)
        for (size_t s = g; s < 3; s += static_cast<size_t>(GetParam().dp)) order.push_back(s);
      for (const size_t num_with_logprobs : {0, 1, 3}) {
        std::vector<SampleRowParams> rows(3, {.temperature = 0});
        for (size_t r = 0; r < 3; ++r) rows[r].top_logprobs = r < num_with_logprobs ? 0 : -1;
        std::vector<SampledRow> sampled(3);
        ASSERT_TRUE(model.ranks().start_sample(rows, {}, {}, {}).ok());
        ASSERT_TRUE(model.ranks().take_sampled(sampled, {}).ok());
        for (size_t r = 0; r < 3; ++r) {
          EXPECT_EQ(sampled[r].status, SampleStatus::kOk);
          EXPECT_EQ(sampled[r].token_id, next[order[r]][0])
              << "step " << i << ", row " << r << ", rows with log-probabilities " << num_with_logprobs;
        }
      }
    }
  }
}

TEST(GpuGroupFlags, RefuseWhatTheyCannotDo) {
  const auto refused = [](const char* what, const auto& change) {
    EngineConfig flags = flags_of({kGptOss, 2, 1}, true);
    flags.model_path = models() + "/demo-gptoss-mxfp4";
    change(flags);
    const auto plan = plan_model(load_model_config(flags.model_path).value(), flags);
    EXPECT_EQ(plan.status().code(), StatusCode::kUnsupported) << what;
    EXPECT_NE(plan.status().message().find(what), std::string::npos) << plan.status().message();
  };
  refused("a2a_checksum", [](EngineConfig& f) { f.moe_a2a_backend = "deepep", f.a2a_checksum = true; });
  refused("fabric=mpi", [](EngineConfig& f) { f.fabric = "mpi"; });
  if (!device_info(gpu_of_rank(15)).ok())
    refused("no GPU ", [](EngineConfig& f) { f.tp_size = f.ep_size = 16; });
}

}  // namespace
}  // namespace fp4moe
