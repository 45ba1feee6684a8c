// The choice of tactics: the fastest correct one wins, choices are cached, and results keep their bits.
#include "engine/startup/autotune.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "engine/startup/kernels_id.h"
#include "engine/startup/tactic_cache.h"
#include "io/file.h"
#include "io/temp_folder.h"
#include "moe/expert_probe.h"

namespace fp4moe {
namespace {

bool always() { return true; }
constexpr auto kGateUp = static_cast<size_t>(TacticOp::kGateUp), kDown = static_cast<size_t>(TacticOp::kDown);

const char* const kFile = "sub/tactics.json";

TEST(Tactics, BucketsByRowsOfAnExpert) {
  const std::vector<std::pair<int64_t, int>> expected = {{0, 0},  {1, 0},  {2, 1},   {4, 1},      {5, 2},
                                                         {32, 2}, {33, 3}, {128, 3}, {1 << 30, 3}};
  for (const auto& [rows, bucket] : expected) EXPECT_EQ(tactic_bucket(rows), bucket) << rows;
}

TEST(ChooseTactics, TheFastestOfEachPlaceWins) {
  // gate/up is fastest with tactic 2 for few rows, with 3 for many; down always with the default.
  const auto timer = [](const Tactics& t, int64_t rows) {
    const size_t bucket = static_cast<size_t>(tactic_bucket(rows));
    const double gate_up = t.chosen[kGateUp][bucket] == (rows <= 4 ? 2 : 3) ? 1 : 2;
    return gate_up + (t.chosen[kDown][bucket] == 0 ? 1 : 2);
  };
  const Tactics chosen = choose_tactics(timer, always);
  EXPECT_EQ(chosen.chosen[kGateUp], (std::array<uint8_t, 4>{2, 2, 3, 3}));
  EXPECT_EQ(chosen.chosen[kDown], (std::array<uint8_t, 4>{0, 0, 0, 0}));
}

TEST(ChooseTactics, AWrongTacticNeverWinsHoweverFast) {
  // Every candidate is timed three times per entry; each is correct twice and wrong the third time.
  std::array<int, kChunkBytes.size()> calls = {};
  const auto timer = [&](const Tactics& t, int64_t rows) {
    const uint8_t tactic = t.chosen[kGateUp][static_cast<size_t>(tactic_bucket(rows))];
    if (tactic == 0) return 1.0;
    return ++calls[tactic] % 3 == 0 ? -1.0 : 0.1;
  };
  EXPECT_EQ(choose_tactics(timer, always).chosen[kGateUp], (std::array<uint8_t, 4>{}));
}

TEST(ChooseTactics, AGainBelowThreePercentIsNoise) {
  const auto timer = [](const Tactics& t, int64_t) { return t == Tactics{} ? 1.0 : 0.98; };
  EXPECT_EQ(choose_tactics(timer, always), Tactics{});
}

TEST(ChooseTactics, WithoutTimeTheDefaultStays) {
  const auto timer = [](const Tactics& t, int64_t) { return t == Tactics{} ? 1.0 : 0.1; };
  EXPECT_EQ(choose_tactics(timer, [] { return false; }), Tactics{});
  int left = 5;  // not enough for one entry
  EXPECT_EQ(choose_tactics(timer, [&] { return left-- > 0; }), Tactics{});
}

TEST(TacticsCache, KeepsEveryKey) {
  const TempFolder folder;
  Tactics a, b, read;
  a.chosen[0][1] = 2;
  b.chosen[1][3] = 3;
  EXPECT_FALSE(*read_tactics(folder.file(kFile), "a", read)) << "a missing file must read as empty";
  EXPECT_FALSE(*read_tactics("/dev/null", "a", read)) << "a device holds no tactics";
  ASSERT_TRUE(write_tactics(folder.file(kFile), "a", a).ok());
  ASSERT_TRUE(write_tactics(folder.file(kFile), "b", b).ok());
  EXPECT_TRUE(*read_tactics(folder.file(kFile), "a", read));
  EXPECT_EQ(read, a);
  EXPECT_TRUE(*read_tactics(folder.file(kFile), "b", read));
  EXPECT_EQ(read, b);
  EXPECT_FALSE(*read_tactics(folder.file(kFile), "c", read));
}

TEST(TacticsCache, ABrokenFileIsAnErrorAndIsReplaced) {
  const std::string deep = "{\"b\": " + std::string(400000, '[') + std::string(400000, ']') + "}";
  for (const std::string& text : std::initializer_list<std::string>{
           deep, "", "[", "[]", "{\"a\": 1}", "{\"a\": [[0,0,0,0]]}", "{\"a\": [[0,0,0,0],[0,0,0,4]]}",
           "{\"a\": [[0,0,0,0],[0,0,0,-1]]}", "{\"a\": [[0,0,0],[0,0,0,0]]}"}) {
    const TempFolder folder;
    std::filesystem::create_directories(std::filesystem::path(folder.file(kFile)).parent_path());
    std::ofstream(folder.file(kFile)) << text;
    Tactics tactics;
    EXPECT_EQ(read_tactics(folder.file(kFile), "a", tactics).status().code(), StatusCode::kDataLoss) << text;
    EXPECT_EQ(tactics, Tactics{});
    ASSERT_TRUE(write_tactics(folder.file(kFile), "a", tactics).ok());
    EXPECT_TRUE(*read_tactics(folder.file(kFile), "a", tactics));
  }
}

struct Demo {
  ModelConfig config;
  Checkpoint checkpoint;
  ModelPlan plan;
};
Demo demo(const EngineConfig& flags) {
  Result<ModelConfig> config = load_model_config(FP4MOE_DEMO_MODEL);
  Result<Checkpoint> checkpoint = Checkpoint::open(FP4MOE_DEMO_MODEL);
  Result<ModelPlan> plan = plan_model(*config, flags);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return {std::move(*config), std::move(*checkpoint), std::move(*plan)};
}

TEST(Autotune, TimesOnceThenReadsTheCache) {
  const TempFolder folder;
  EngineConfig flags;
  flags.autotune_cache = folder.file(kFile);
  flags.threads = 2;
  const Demo d = demo(flags);
  const Result<TuneResult> first = autotune(d.checkpoint, d.config, d.plan);
  ASSERT_TRUE(first.ok()) << first.status().to_string();
  EXPECT_NE(first->note.find("timed in"), std::string::npos) << first->note;
  const Result<TuneResult> second = autotune(d.checkpoint, d.config, d.plan);
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second->note.find("cached in"), std::string::npos) << second->note;
  EXPECT_EQ(first->moe.tactics(), second->moe.tactics());
  flags.threads = 1;  // changes the key
  const Demo other = demo(flags);
  EXPECT_NE(autotune(other.checkpoint, other.config, other.plan)->note.find("timed in"), std::string::npos);
}

// The cache was written before the kernels changed.
TEST(Autotune, TacticsOfOtherKernelsAreNotUsed) {
  const TempFolder folder;
  EngineConfig flags;
  flags.autotune_cache = folder.file(kFile);
  const Demo d = demo(flags);
  ASSERT_TRUE(autotune(d.checkpoint, d.config, d.plan).ok());
  std::string cache = *read_text_file(folder.file(kFile), 1 << 20);
  const size_t at = cache.find(kernels_id());
  ASSERT_NE(at, std::string::npos) << cache;
  cache.replace(at, 12, "000000000000");
  ASSERT_TRUE(write_text_file(folder.file(kFile), cache).ok());
  const Result<TuneResult> again = autotune(d.checkpoint, d.config, d.plan);
  ASSERT_TRUE(again.ok());
  EXPECT_NE(again->note.find("timed in"), std::string::npos) << again->note;
}

TEST(Autotune, OffMeansShippedTacticsAndNoFile) {
  const TempFolder folder;
  EngineConfig flags;
  flags.autotune_cache = folder.file(kFile);
  flags.disable_autotune = true;
  EngineConfig no_budget;
  no_budget.autotune_cache = folder.file(kFile);
  no_budget.autotune_budget = 0;
  EngineConfig oracle;
  oracle.autotune_cache = folder.file(kFile);
  oracle.dtype = "float32";
  for (const EngineConfig& f : {flags, no_budget, oracle}) {
    const Demo d = demo(f);
    const Result<TuneResult> result = autotune(d.checkpoint, d.config, d.plan);
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->moe.tactics(), Tactics{});
    EXPECT_NE(result->note.find("shipped tactics"), std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(folder.file(kFile)));
}

TEST(Autotune, EveryTacticGivesTheSameBits) {
  ThreadPool pool(3);
  const Demo d = demo({});
  const Result<MoeWeightsView> weights = load_expert_weights(d.checkpoint, d.config, 0);
  MoeProblem problem = d.plan.moe.problem();
  problem.top_k = 1;
  for (const Scheme scheme : {Scheme::kW4A16, Scheme::kW4A8}) {
    Result<ExpertProbe> probe =
        ExpertProbe::make(*d.plan.moe.runner(), problem, {scheme}, *weights, {.rows_per_expert = 40}, pool);
    ASSERT_TRUE(probe.ok());
    for (const int64_t rows : {1, 3, 40}) {
      probe->experts().tactics = {};
      const std::span<const float> y = *probe->run(rows, pool);
      const std::vector<float> expected(y.begin(), y.end());
      for (uint8_t i = 1; i < kChunkBytes.size(); ++i) {
        for (auto& op : probe->experts().tactics.chosen) op.fill(i);
        const std::span<const float> same = *probe->run(rows, pool);
        EXPECT_TRUE(std::equal(same.begin(), same.end(), expected.begin())) << int{i} << " rows " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace fp4moe
