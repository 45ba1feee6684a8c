// The heap of ranks on GPUs: where each communicator's region is, and the bytes of both models' exchanges.
#include "engine/ranks/comm_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/absent_gpu.h"
#include "engine/ranks/rank_config.h"
#include "engine/ranks/set_layout.h"
#include "io/tiny_config.h"
#include "model/plan_draft.h"

namespace fp4moe {
namespace {

constexpr int64_t kGroupRows = 300;

struct Layout {
  int tp = 1, ep = 1, dp = 1;
  const char* a2a = "none";
  bool deterministic = false;
  std::string text() const {
    return "tp " + std::to_string(tp) + " ep " + std::to_string(ep) + " dp " + std::to_string(dp) + " " +
           a2a + (deterministic ? " deterministic" : "");
  }
};
constexpr Layout kLayouts[] = {
    {2, 1, 1},           {2, 2, 1, "deepep"},     {2, 1, 2},
    {2, 2, 2, "deepep"}, {4, 4, 4, "flashinfer"}, {2, 1, 1, "none", true},
    {4, 4, 2},           {8, 8, 4, "deepep"},     {4, 4, 4, "none", true},
};

EngineConfig flags_of(const Layout& layout) {
  EngineConfig flags;
  set_layout(flags, layout);
  flags.enable_deterministic_inference = layout.deterministic;
  flags.a2a_memory_budget = int64_t{1} << 40;
  return flags;
}

ModelPlan plan_of(const ModelConfig& config, const EngineConfig& flags) {
  Result<ModelPlan> plan = plan_model(config, flags, absent_gpu("h200", 0).value());
  if (!plan.ok()) throw std::runtime_error(plan.status().to_string());
  return std::move(*plan);
}

// A draft model that is a whole model, with a2a none.
std::shared_ptr<DraftPlan> draft_of(const ModelConfig& config, EngineConfig flags) {
  flags.moe_a2a_backend = "none";
  auto draft = std::make_shared<DraftPlan>();
  draft->config = config;
  draft->plan = plan_of(config, flags);
  return draft;
}

Result<CommMemory> memory_of(const ModelConfig& config, const ModelPlan& plan) {
  const RankGroupOptions options{
      .max_batch_tokens = kGroupRows, .max_logit_rows = 8 * plan.moe.problem().layout.dp, .num_kv_pages = 64};
  return comm_memory(plan.moe, step_limits(config, plan, plan.flags, options), draft_moe(plan));
}

int64_t padded(int64_t num_bytes) { return (num_bytes + 127) / 128 * 128; }

// The formula of docs/a2a.md for a model with a2a none, each array padded.
int64_t expected_exchange_bytes(const ModelConfig& c, const Layout& layout) {
  if (layout.tp == 1 || (layout.dp == 1 && !layout.deterministic)) return 0;
  const int64_t r = layout.tp, k = c.top_k, t = std::max<int64_t>(kGroupRows / r, 1);
  const int64_t sums = layout.ep == 1 ? r : std::min(r, k), results = layout.deterministic ? k : sums;
  const int64_t result_bytes = c.hidden_size * (layout.deterministic ? 2 : 4);
  const int64_t direct = layout.deterministic || layout.ep != r
                             ? 0
                             : padded(16 * 2 * c.hidden_size) + padded(16 * k * 8) + padded(8 * result_bytes);
  return padded(r * t * 2 * c.hidden_size) + 2 * padded(r * t * k * 4) + padded(t * results * result_bytes) +
         direct;
}

// The regions that are not empty, one behind the other up to the end of the heap.
void expect_apart(const CommMemory& memory, const Layout& layout) {
  struct Part {
    int64_t begin, end;
  };
  std::vector<Part> parts;
  const auto add = [&](const DeviceRegion& region, int num_ranks) {
    if (region.word_bytes + region.gather_bytes + region.exchange_bytes == 0) return;
    EXPECT_EQ(region.offset % 128, 0);
    parts.push_back({region.offset, region.offset + region.num_bytes(num_ranks)});
  };
  add(memory.device_attention, layout.tp / layout.dp);
  add(memory.device_head, layout.tp);
  add(memory.device_world, layout.tp);
  add(memory.device_draft_world, layout.tp);
  std::ranges::sort(parts, {}, &Part::begin);
  int64_t end = 0;
  for (const Part& part : parts) {
    EXPECT_EQ(part.begin, end) << layout.text();
    end = part.end;
  }
  EXPECT_EQ(memory.heap_bytes, end) << layout.text();
  EXPECT_EQ(memory.a2a_bytes, memory.device_world.exchange_bytes + memory.device_draft_world.exchange_bytes);
  EXPECT_EQ(memory.communicator_bytes + memory.a2a_bytes, memory.heap_bytes) << layout.text();
}

TEST(CommMemoryOfGpus, HasARegionForEachModelsExchanges) {
  const ModelConfig target = config_of({.like = "deepseek-v3-tiny"});
  int num_exchanging = 0;
  for (const char* like : {"gpt-oss-tiny", "gpt-oss-20b"})
    for (const Layout& layout : kLayouts) {
      const ModelConfig small = config_of({.like = like});
      const EngineConfig flags = flags_of(layout);
      ModelPlan plan = plan_of(target, flags);
      const CommMemory alone = memory_of(target, plan).value();
      expect_apart(alone, layout);
      EXPECT_EQ(alone.draft_a2a_bytes, 0);
      plan.draft = draft_of(small, flags);
      const CommMemory both = memory_of(target, plan).value();
      expect_apart(both, layout);
      EXPECT_EQ(both.device_world.exchange_bytes, alone.device_world.exchange_bytes) << layout.text();
      EXPECT_EQ(both.draft_a2a_bytes, expected_exchange_bytes(small, layout)) << layout.text();
      EXPECT_EQ(both.device_draft_world.exchange_bytes, both.draft_a2a_bytes) << layout.text();
      num_exchanging += both.draft_a2a_bytes > 0;
    }
  EXPECT_EQ(num_exchanging, 2 * 7);
}

// The region has room for the choices of 8 rows per group, and for the logits of one group's rows, which are
// more bytes than the hidden rows of all groups.
TEST(CommMemoryOfGpus, GroupsShareAnLmHeadUnlessTheyHaveTheirOwn) {
  const ModelConfig config = config_of({.like = "gpt-oss-20b"});
  for (const Layout& layout : kLayouts) {
    EngineConfig flags = flags_of(layout);
    const DeviceRegion shared = memory_of(config, plan_of(config, flags)).value().device_head;
    EXPECT_EQ(shared.word_bytes, layout.dp > 1 ? padded(8 * layout.dp * 8) : 0) << layout.text();
    EXPECT_EQ(shared.gather_bytes, layout.dp > 1 ? 8 * config.vocab_size * 4 : 0) << layout.text();
    flags.enable_dp_lm_head = true;
    EXPECT_EQ(memory_of(config, plan_of(config, flags)).value().device_head.gather_bytes, 0);
  }
}

// The head of EAGLE-3 runs by the target's plan, whose experts it lacks.
TEST(CommMemoryOfGpus, ADraftModelWithoutExpertsExchangesNothing) {
  const ModelConfig target = config_of({.like = "gpt-oss-tiny"});
  for (const Layout& layout : kLayouts) {
    ModelPlan plan = plan_of(target, flags_of(layout));
    const CommMemory alone = memory_of(target, plan).value();
    auto head = std::make_shared<DraftPlan>();
    head->algorithm = DraftAlgorithm::kEagle3;
    head->config = target;
    head->config.num_experts = 0;
    head->plan = plan;
    plan.draft = head;
    const CommMemory both = memory_of(target, plan).value();
    EXPECT_EQ(both.heap_bytes, alone.heap_bytes) << layout.text();
    EXPECT_EQ(both.device_draft_world.exchange_bytes, 0) << layout.text();
  }
}

// Ranks in several processes have separate regions, with room for what each other rank sends.
TEST(CommMemoryOfGpus, RegionsOfSeveralProcessesAreStaged) {
  const ModelConfig config = config_of({.like = "gpt-oss-20b"});
  setenv("OMPI_COMM_WORLD_RANK", "0", 1);
  for (const Layout& layout : kLayouts) {
    setenv("OMPI_COMM_WORLD_SIZE", std::to_string(layout.tp).c_str(), 1);
    const CommMemory memory = memory_of(config, plan_of(config, flags_of(layout))).value();
    int64_t num_bytes = 0;
    const auto add = [&](const DeviceRegion& region, int num_ranks) {
      if (region.word_bytes + region.exchange_bytes == 0) return;
      EXPECT_TRUE(region.is_staged);
      EXPECT_EQ(region.offset, 0);
      num_bytes += region.num_bytes(num_ranks);
    };
    add(memory.device_attention, layout.tp / layout.dp);
    add(memory.device_world, layout.tp);
    EXPECT_EQ(memory.heap_bytes, num_bytes) << layout.text();
    EXPECT_EQ(memory.step_bytes, 0);
    if (layout.tp > layout.dp) {
      EXPECT_EQ(memory.device_attention.word_bytes * layout.tp / layout.dp, 32 << 20);
    }
    if (const int64_t r = layout.tp; memory.a2a_bytes > 0) {
      const int64_t k = config.top_k, t = std::max<int64_t>(kGroupRows / r, 1), h = config.hidden_size;
      const bool slots = layout.deterministic || std::string(layout.a2a) == "deepep";
      const int64_t result_bytes = h * (slots || std::string(layout.a2a) == "flashinfer" ? 2 : 4);
      EXPECT_EQ(memory.a2a_bytes, padded(r * t * 2 * h) + 2 * padded(r * t * k * 4) +
                                      2 * padded(r * t * (slots ? k : 1) * result_bytes))
          << layout.text();
    }
  }
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}) unsetenv(name);
}

TEST(CommMemoryOfGpus, ABudgetThatIsTooSmallNamesTheModel) {
  const ModelConfig small = config_of({.like = "gpt-oss-tiny"}), large = config_of({.like = "gpt-oss-20b"});
  EngineConfig flags = flags_of({2, 1, 2});
  flags.a2a_memory_budget = 24 << 10;
  ModelPlan plan = plan_of(small, flags);
  ASSERT_TRUE(memory_of(small, plan).ok());
  plan.draft = draft_of(large, flags);
  const Status status = memory_of(small, plan).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_TRUE(
      status.message().starts_with("draft model: --a2a-memory-budget 24576: a2a none needs at least "))
      << status.message();
}

}  // namespace
}  // namespace fp4moe
