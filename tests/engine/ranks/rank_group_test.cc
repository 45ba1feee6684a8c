// Whole models on thread ranks: one step with all groups' batches compared with a single rank.
#include "engine/ranks/rank_group.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/relative_l2.h"
#include "engine/ranks/comm_memory.h"
#include "engine/ranks/loaded_ranks.h"
#include "engine/ranks/rank_config.h"
#include "engine/startup/memory_plan.h"

namespace fp4moe {
namespace {

struct Layout {
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
};

EngineConfig flags_of(const char* model, const Layout& layout) {
  EngineConfig flags;
  flags.model_path = std::string(FP4MOE_MODELS) + "/" + model;
  flags.threads = 2;
  flags.max_total_tokens = 64;
  flags.tp_size = layout.tp;
  flags.ep_size = layout.ep;
  flags.dp_size = layout.dp;
  flags.enable_dp_attention = layout.dp > 1;
  flags.moe_a2a_backend = layout.a2a;
  return flags;
}

constexpr RankGroupOptions kOptions{.max_batch_tokens = 16, .max_logit_rows = 32, .num_kv_pages = 4};

LoadedRanks load(const EngineConfig& flags) { return load_ranks(flags, kOptions); }

// Runs the same prompt on the groups in `mask` while all other groups are idle. Returns all logits, [busy
// groups, rows, V].
std::vector<float> logits_of(LoadedRanks& loaded, uint32_t mask) {
  const std::vector<int32_t> ids = {5, 17, 300, 42, 7, 9}, pages = {2};
  std::vector<int64_t> rows(ids.size());
  std::iota(rows.begin(), rows.end(), 0);
  const SequenceRows sequence{0, static_cast<int64_t>(ids.size()), 0, pages};
  std::vector<Batch> groups(static_cast<size_t>(loaded.ranks->num_groups()));
  size_t num_busy = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    if ((mask >> g & 1) == 0) continue;
    groups[g] = {ids, rows, {&sequence, 1}, rows};
    ++num_busy;
  }
  const Status status = loaded.ranks->execute_step(groups);
  EXPECT_TRUE(status.ok()) << status.to_string();
  const float* logits = loaded.ranks->logits();
  return {logits, logits + num_busy * ids.size() * static_cast<size_t>(loaded.config.vocab_size)};
}

class RankGroups : public testing::TestWithParam<const char*> {};

TEST_P(RankGroups, AgreeWithOneRank) {
  LoadedRanks one = load(flags_of(GetParam(), {})),
              one_deepep = load(flags_of(GetParam(), {.a2a = "deepep"}));
  const std::vector<float> want = logits_of(one, 1), want_deepep = logits_of(one_deepep, 1);
  for (const Layout& layout : {Layout{2, 1, 1, "none"}, Layout{4, 4, 1, "none"}, Layout{4, 4, 2, "none"},
                               Layout{4, 4, 4, "none"}, Layout{4, 4, 1, "deepep"}, Layout{4, 4, 2, "deepep"},
                               Layout{4, 4, 4, "deepep"}, Layout{4, 4, 4, "flashinfer"}}) {
    SCOPED_TRACE(testing::Message() << "tp " << layout.tp << " ep " << layout.ep << " dp " << layout.dp << " "
                                    << layout.a2a);
    LoadedRanks many = load(flags_of(GetParam(), layout));
    ASSERT_NE(many.ranks, nullptr);
    EXPECT_EQ(many.ranks->num_groups(), layout.dp);
    const std::vector<float> first = logits_of(many, 1);
    EXPECT_LT(relative_l2(first, want), 2e-2);
    EXPECT_EQ(logits_of(many, 1), first) << "a second run gives different bits";
    const uint32_t last = 1u << (layout.dp - 1);  // only the last group has work
    EXPECT_EQ(logits_of(many, last), first) << "the last group gives different bits";
    EXPECT_EQ(logits_of(many, 0).size(), 0u);
    const std::vector<float> all = logits_of(many, (1u << layout.dp) - 1);
    for (int g = 0; g < layout.dp; ++g)
      EXPECT_TRUE(
          std::equal(first.begin(), first.end(), all.begin() + g * static_cast<int64_t>(first.size())))
          << "group " << g << " with all groups busy";
    if (layout.dp == layout.tp && std::string_view(layout.a2a) == "deepep") {
      EXPECT_EQ(first, want_deepep);
    }
  }
}

// Every token of every group counts once in each layer with a router, whichever rank routes it. Layouts that
// give one rank's bits also give its counts.
TEST_P(RankGroups, CountEveryTokenOnce) {
  LoadedRanks one = load(flags_of(GetParam(), {.a2a = "deepep"}));
  logits_of(one, 1);
  const ExpertLoad want = one.ranks->expert_load();
  const bool has_dense_layer = GetParam() == std::string_view("demo-dsv3-nvfp4");
  EXPECT_EQ(want.layers,
            has_dense_layer ? (std::vector<int64_t>{1, 2, 3}) : (std::vector<int64_t>{0, 1, 2, 3}));
  ASSERT_EQ(want.num_experts, 16);
  for (const Layout& layout :
       {Layout{2, 1, 1, "none"}, Layout{4, 4, 2, "none"}, Layout{4, 4, 4, "none"}, Layout{4, 4, 1, "deepep"},
        Layout{4, 4, 2, "deepep"}, Layout{4, 4, 4, "deepep"}, Layout{4, 4, 1, "flashinfer"},
        Layout{4, 4, 4, "flashinfer"}}) {
    SCOPED_TRACE(testing::Message() << "tp " << layout.tp << " ep " << layout.ep << " dp " << layout.dp << " "
                                    << layout.a2a);
    LoadedRanks many = load(flags_of(GetParam(), layout));
    ASSERT_NE(many.ranks, nullptr);
    logits_of(many, (1u << layout.dp) - 1);
    const ExpertLoad got = many.ranks->expert_load();
    EXPECT_EQ(got.failure, "");
    EXPECT_EQ(got.layers, want.layers);
    EXPECT_EQ(got.counted_ranks, layout.tp);
    EXPECT_EQ(got.num_ranks, layout.tp);
    for (size_t row = 0; row < got.layers.size(); ++row) {
      const auto first = got.tokens.begin() + static_cast<int64_t>(row * 16);
      EXPECT_EQ(std::accumulate(first, first + 16, int64_t{0}), 6 * 4 * layout.dp) << "layer " << row;
    }
    if (layout.dp == layout.tp && std::string_view(layout.a2a) == "deepep") {
      for (size_t i = 0; i < got.tokens.size(); ++i) EXPECT_EQ(got.tokens[i], 4 * want.tokens[i]) << i;
    }
  }
}

// Memory use after loading matches the plan.
TEST_P(RankGroups, MemoryIsAsPlanned) {
  for (const Layout& layout :
       {Layout{}, Layout{2, 1, 1, "none"}, Layout{4, 4, 2, "none"}, Layout{4, 4, 4, "deepep"}}) {
    SCOPED_TRACE(testing::Message() << "tp " << layout.tp << " dp " << layout.dp << " " << layout.a2a);
    LoadedRanks loaded = load(flags_of(GetParam(), layout));
    ASSERT_NE(loaded.ranks, nullptr);
    const MemoryProblem problem =
        memory_problem(*loaded.checkpoint, loaded.config, loaded.plan, loaded.plan.flags).value();
    const int64_t page_bytes = problem.kv_bytes_per_page + problem.window_bytes_per_page;
    EXPECT_EQ(loaded.ranks->kv_bytes(), page_bytes * kOptions.num_kv_pages);
    const StepLimits limits = step_limits(loaded.config, loaded.plan, loaded.plan.flags, kOptions);
    EXPECT_EQ(loaded.ranks->comm_bytes(), layout.tp * comm_memory(loaded.plan.moe, limits)->heap_bytes);
    const double planned = static_cast<double>(problem.weight_bytes);
    EXPECT_NEAR(static_cast<double>(loaded.ranks->weight_bytes()) / planned, 1.0, 0.1);
  }
}

INSTANTIATE_TEST_SUITE_P(Demos, RankGroups, testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         [](const auto& test) { return std::string(test.param).substr(5, 4); });

}  // namespace
}  // namespace fp4moe
