// The whole engine on GPUs with drafts, with deterministic inference: texts and log-probabilities have the
// bits of plain decoding, in graphs and launched kernel by kernel, on one rank and on several that share a
// GPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/ranks/set_layout.h"
#include "engine/speculative_crowd.h"
#include "engine/trained_drafts.h"
#include "engine/uneven_crowd.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 0);
  return true;
}();

struct Layout {
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
  const char* kv_dtype = "auto";
  int64_t max_total_tokens = 8192;  // few: some requests are retracted
  bool disable_cuda_graph = false;
  bool disable_hybrid_swa_memory = false;
};

EngineConfig config_for(const std::string& model, const Layout& layout) {
  EngineConfig config = config_of(model);
  config.enable_deterministic_inference = true;
  set_layout(config, layout);
  config.kv_cache_dtype = layout.kv_dtype;
  config.max_total_tokens = layout.max_total_tokens;
  config.schedule_conservativeness = 0;
  config.disable_cuda_graph = layout.disable_cuda_graph;
  config.disable_hybrid_swa_memory = layout.disable_hybrid_swa_memory;
  config.comm_timeout = 20;
  return config;
}

bool has_ranks(int num_ranks) { return device_info(gpu_of_rank(num_ranks - 1)).ok(); }

class GpuSpeculation : public ::testing::TestWithParam<const char*> {
 protected:
  static void expect_outputs_of_plain_decoding(const Layout& layout, const std::string& what) {
    const EngineConfig config = config_for(GetParam(), layout);
    const Crowd plain = run_crowd(config), drafted = run_crowd(with_ngrams(config));
    expect_plain(drafted, plain, what);
    if (layout.max_total_tokens == 640) {
      EXPECT_GT(drafted.stats.num_retracted_reqs, 0);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Demos, GpuSpeculation, ::testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         demo_name);

TEST_P(GpuSpeculation, OutputsAreThoseOfPlainDecoding) {
  expect_outputs_of_plain_decoding({}, "one rank");
  expect_outputs_of_plain_decoding({.disable_cuda_graph = true}, "without graphs");
  expect_outputs_of_plain_decoding({.kv_dtype = "fp8_e4m3"}, "FP8 pages");
  expect_outputs_of_plain_decoding({.max_total_tokens = 640}, "few pages");
  expect_outputs_of_plain_decoding({.disable_hybrid_swa_memory = true}, "without window pages");
}

TEST_P(GpuSpeculation, SeveralRanksHaveThemToo) {
  if (!has_ranks(4))
    GTEST_SKIP() << "4 ranks at " << ranks_per_gpu() << " ranks per GPU need GPU " << gpu_of_rank(3);
  expect_outputs_of_plain_decoding({.tp = 2}, "tp 2");
  expect_outputs_of_plain_decoding({.tp = 4, .ep = 4, .dp = 2}, "tp 4, ep 4, dp 2");
  expect_outputs_of_plain_decoding({.tp = 4, .ep = 4, .dp = 2, .a2a = "deepep"}, "deepep");
  expect_outputs_of_plain_decoding({.tp = 2, .ep = 2, .dp = 2, .a2a = "flashinfer"}, "flashinfer");
}

// Without deterministic inference the rows of drafts change the last bits, as any other batch does.
TEST_P(GpuSpeculation, OtherwiseMostTextsAreThoseOfPlainDecoding) {
  EngineConfig config = config_for(GetParam(), {});
  config.enable_deterministic_inference = false;
  const Crowd plain = run_crowd(config), drafted = run_crowd(with_ngrams(config));
  ASSERT_EQ(plain.outputs.size(), drafted.outputs.size());
  int64_t num_equal = 0;
  for (size_t i = 0; i < plain.outputs.size(); ++i)
    num_equal += drafted.outputs[i].text == plain.outputs[i].text ? 1 : 0;
  EXPECT_GT(num_equal, 8) << "of " << plain.outputs.size();
  EXPECT_GT(drafted.stats.spec_correct_drafts_total, 100);
}

// A model drafts for itself, so that drafts are right; the other demo's are mostly wrong.
TEST_P(GpuSpeculation, ADraftModelChangesNoOutput) {
  const std::string model = GetParam();
  const char* other = model == "demo-dsv3-nvfp4" ? "demo-gptoss-mxfp4" : "demo-dsv3-nvfp4";
  for (const Layout& layout :
       {Layout{}, Layout{.max_total_tokens = 640}, Layout{.kv_dtype = "fp8_e4m3", .disable_cuda_graph = true},
        Layout{.tp = 2}, Layout{.tp = 4, .ep = 4, .a2a = "deepep"}}) {
    if (!has_ranks(layout.tp)) continue;
    EngineConfig config = config_for(model, layout);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "STANDALONE";
    config.speculative_num_steps = 3;
    for (const std::string& draft : {model, std::string(other)}) {
      config.speculative_draft_model_path = FP4MOE_MODELS "/" + draft;
      expect_plain(run_crowd(config), plain, draft + " drafts, tp " + std::to_string(layout.tp));
    }
  }
}

// Data-parallel groups of one rank and of two.
constexpr Layout kGroupLayouts[] = {
    {.tp = 2, .ep = 1, .dp = 2},
    {.tp = 2, .ep = 2, .dp = 2, .a2a = "deepep"},
    {.tp = 4, .ep = 4, .dp = 2},
    {.tp = 4, .ep = 4, .dp = 2, .a2a = "deepep"},
    {.tp = 2, .ep = 2, .dp = 2, .a2a = "flashinfer"},
    {.tp = 4, .ep = 4, .dp = 4, .a2a = "flashinfer"},
    {.tp = 4, .ep = 4, .dp = 4, .a2a = "deepep", .disable_cuda_graph = true},
};

TEST_P(GpuSpeculation, ADraftModelOfDataParallelGroupsHasTheOutputsOfOneRank) {
  const std::string model = GetParam();
  const Crowd plain = run_crowd(config_for(model, {}));
  for (const Layout& layout : kGroupLayouts) {
    if (!has_ranks(layout.tp)) continue;
    EngineConfig config = config_for(model, layout);
    config.speculative_algorithm = "STANDALONE";
    config.speculative_num_steps = 3;
    config.speculative_draft_model_path = FP4MOE_MODELS "/" + model;
    expect_plain(run_crowd(config), plain,
                 "tp " + std::to_string(layout.tp) + ", dp " + std::to_string(layout.dp) + ", " + layout.a2a);
  }
}

// The parameter: the draft model, and whether drafts are accepted on the device.
class GpuTrainedDrafts : public ::testing::TestWithParam<std::tuple<TrainedDraft, bool>> {
 protected:
  static TrainedDraft drafter() { return std::get<0>(GetParam()); }
  static EngineConfig config(const Layout& layout) {
    EngineConfig config = config_for(drafter().model, layout);
    config.speculative_accepts_on_device = std::get<1>(GetParam());
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Demos, GpuTrainedDrafts,
                         ::testing::Combine(::testing::ValuesIn(kTrainedDrafts), ::testing::Bool()),
                         [](const auto& which) {
                           return std::string(std::get<0>(which.param).algorithm) +
                                  (std::get<1>(which.param) ? "AcceptedOnDevice" : "");
                         });

// Nothing but greedy rows without log-probabilities, which another kernel samples; also with few pages.
TEST_P(GpuTrainedDrafts, OfGreedyRowsChangeNoOutput) {
  for (const Layout& layout : {Layout{.max_total_tokens = 640}, Layout{.tp = 2}, Layout{.tp = 2, .dp = 2}}) {
    if (!has_ranks(layout.tp)) continue;
    const EngineConfig plain = config(layout), drafted = with_trained_drafts(plain, drafter());
    const auto run = [](const EngineConfig& with) { return run_examples(with, drafter(), {0.0f}, -1); };
    EXPECT_EQ(run(drafted).outputs, run(plain).outputs) << "tp " << layout.tp << ", dp " << layout.dp;
  }
}

TEST_P(GpuTrainedDrafts, AreOftenRightAndChangeNoOutput) {
  expect_trained_drafts(config({}), drafter(), "one rank");
  expect_trained_drafts(config({.disable_cuda_graph = true}), drafter(), "without graphs");
  expect_trained_drafts(config({.kv_dtype = "fp8_e4m3"}), drafter(), "FP8 pages");
}

TEST_P(GpuTrainedDrafts, AreSoOnSeveralRanks) {
  if (!has_ranks(4)) GTEST_SKIP() << "4 ranks need GPU " << gpu_of_rank(3);
  expect_trained_drafts(config({.tp = 2}), drafter(), "tp 2");
  expect_trained_drafts(config({.tp = 4, .ep = 4, .a2a = "deepep"}), drafter(), "deepep");
}

TEST_P(GpuTrainedDrafts, OfDataParallelGroupsHaveTheOutputsOfOneRank) {
  if (!has_ranks(2)) GTEST_SKIP() << "2 ranks need GPU " << gpu_of_rank(1);
  for (const Layout& layout : kGroupLayouts)
    if (has_ranks(layout.tp)) expect_uneven_outputs(config(layout), config({}), drafter());
}

TEST_P(GpuTrainedDrafts, OfDataParallelGroupsAreOftenRight) {
  if (!has_ranks(4)) GTEST_SKIP() << "4 ranks need GPU " << gpu_of_rank(3);
  expect_trained_drafts(config({.tp = 4, .ep = 4, .dp = 4, .a2a = "flashinfer"}), drafter(),
                        "flashinfer, dp 4");
}

}  // namespace
}  // namespace fp4moe
