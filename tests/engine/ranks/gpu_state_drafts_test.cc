// The whole engine on GPUs with drafts for models with states, with deterministic inference: texts and
// log-probabilities have the bits of plain decoding, in graphs and launched kernel by kernel, on one rank and
// on several that share a GPU.
#include <gtest/gtest.h>

#include <cstdlib>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/ranks/set_layout.h"
#include "engine/speculative_crowd.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the first variable; the second lets engines draft.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 0);
  return true;
}();

struct Layout {
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
  int64_t max_total_tokens = 8192;  // few: some requests are retracted
  bool disable_cuda_graph = false;
  std::string text() const {
    return "tp " + std::to_string(tp) + ", dp " + std::to_string(dp) + ", " + a2a + ", " +
           std::to_string(max_total_tokens) + " tokens" + (disable_cuda_graph ? "" : ", graphs");
  }
};

constexpr Layout kLayouts[] = {
    {},
    {.max_total_tokens = 640},
    {.disable_cuda_graph = true},
    {.tp = 2},
    {.tp = 2, .ep = 2, .a2a = "deepep"},
    {.tp = 4, .ep = 4, .dp = 2, .a2a = "deepep"},
    {.tp = 2, .ep = 2, .dp = 2, .a2a = "flashinfer"},
};

bool has_ranks(const Layout& layout) { return device_info(gpu_of_rank(layout.tp - 1)).ok(); }

EngineConfig config_for(const std::string& path, const Layout& layout) {
  EngineConfig config;
  config.model_path = path;
  config.threads = 2;
  config.page_size = 8;
  config.context_length = 512;
  config.mamba_track_interval = 32;
  config.enable_deterministic_inference = true;
  set_layout(config, layout);
  config.max_total_tokens = layout.max_total_tokens;
  config.schedule_conservativeness = 0;
  config.disable_cuda_graph = layout.disable_cuda_graph;
  config.comm_timeout = 20;
  return config;
}

const std::string kDemo = std::string(FP4MOE_MODELS) + "/demo-qwen35-nvfp4";

void expect_plain_outputs(const EngineConfig& config, const Crowd& plain, const std::string& what) {
  const Crowd drafted = run_crowd(config);
  expect_plain(drafted, plain, what, /*correct=*/0);
  EXPECT_EQ(drafted.stats.num_used_state_slots, 0) << what;
}

TEST(GpuStateDrafts, NgramsChangeNoOutput) {
  for (const Layout& layout : kLayouts) {
    if (!has_ranks(layout)) continue;
    const EngineConfig config = config_for(kDemo, layout);
    const Crowd plain = run_crowd(config);
    expect_plain_outputs(with_ngrams(config), plain, layout.text());
  }
}

// Up to 16 drafts; all, some or none of them are replayed. Few slots leave room for one snapshot.
TEST(GpuStateDrafts, DraftsOfEveryKindChangeNoOutput) {
  for (const Layout& layout : {Layout{}, Layout{.disable_cuda_graph = true}}) {
    EngineConfig config = config_for(kDemo, layout);
    const Crowd plain = run_crowd(config);
    const auto whole = whole_texts(config, plain);
    config = with_ngrams(config);
    for (const DraftKind kind : {DraftKind::kWrong, DraftKind::kMixed, DraftKind::kRight})
      for (const int num_tokens : {2, 6, 17}) {
        config.speculative_num_draft_tokens = num_tokens;
        config.max_running_requests = num_tokens == 6 ? 64 : 8;
        config.max_mamba_cache_size = num_tokens == 6 ? 0 : 9;
        config.draft_source = drafts_of_kind(whole, kind);
        const Crowd drafted = run_crowd(config);
        const std::string what = layout.text() + ", " + std::to_string(num_tokens) + " tokens a step, kind " +
                                 std::to_string(static_cast<int>(kind));
        ASSERT_EQ(drafted.outputs, plain.outputs) << what;
        EXPECT_EQ(drafted.stats.num_used_state_slots, 0) << what;
        EXPECT_GT(drafted.stats.spec_proposed_drafts_total, 500) << what;
        if (kind == DraftKind::kRight) {
          EXPECT_GT(drafted.stats.spec_accept_length(), 0.5 * num_tokens) << what;
        }
      }
  }
}

TEST(GpuStateDrafts, ADraftModelChangesNoOutput) {
  for (const Layout& layout : {Layout{}, Layout{.disable_cuda_graph = true}, Layout{.tp = 2}}) {
    if (!has_ranks(layout)) continue;
    EngineConfig config = config_for(kDemo, layout);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "STANDALONE";
    config.speculative_num_steps = 3;
    config.speculative_draft_model_path = FP4MOE_MODELS "/demo-dsv3-nvfp4";
    expect_plain_outputs(config, plain, layout.text());
  }
}

// Random checkpoints with a layer for multi-token prediction, whose experts are bf16 or FP4.
TEST(GpuStateDrafts, AnMtpLayerChangesNoOutput) {
  for (const char* dialect : {"modelopt", "compressed-nvfp4"})
    for (const char* like : {"qwen3.5-moe-tiny", "qwen3-next-tiny"}) {
      const TempFolder folder;
      MakeTinyOptions options = small_model(like);
      options.dialect = dialect;
      options.num_mtp_layers = 1;
      options.vocab_size = 259;  // every id has a token
      options.intermediate_size = 128;
      ASSERT_TRUE(is_ok(make_tiny(folder.path(), options)));
      for (const Layout& layout : kLayouts) {
        if (!has_ranks(layout)) continue;
        EngineConfig config = config_for(folder.path(), layout);
        const Crowd plain = run_crowd(config);
        config.speculative_algorithm = "EAGLE";
        config.speculative_num_steps = 3;
        expect_plain_outputs(config, plain, std::string(like) + " " + dialect + ", " + layout.text());
      }
    }
}

}  // namespace
}  // namespace fp4moe
