// The weight cache of whole models: the file's path and key, and equal outputs of a model loaded from the
// file.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>

#include "base/log.h"
#include "engine/startup/weight_cache.h"
#include "fp4moe/engine.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

namespace fs = std::filesystem;

// ---- the path -------------------------------------------------------------------------------------

// A copy of a demo checkpoint with unchanged file times.
class CopiedModel {
 public:
  CopiedModel() {
    const fs::path from = fs::path(FP4MOE_MODELS) / "demo-gptoss-mxfp4";
    fs::create_directory(path());
    for (const auto& entry : fs::directory_iterator(from))
      if (entry.is_regular_file()) fs::copy(entry.path(), path() + "/" + entry.path().filename().string());
  }
  std::string path() const { return folder_.file("model"); }
  std::string cache() const { return folder_.file("cache"); }
  std::string weights() const { return path() + "/model.safetensors"; }

  WeightCachePlace place(EngineConfig flags = {}, int rank = 0) const {
    flags.model_path = path();
    if (flags.weight_cache_dir.empty()) flags.weight_cache_dir = cache();
    const auto config = load_model_config(path());
    const auto plan = plan_model(*config, flags);
    EXPECT_TRUE(plan.ok()) << plan.status().to_string();
    const auto checkpoint = Checkpoint::open(path());
    RankLayout layout = plan->moe.problem().layout;
    layout.rank = rank;
    return weight_cache_place(*checkpoint, *plan, layout);
  }

 private:
  TempFolder folder_;
};

TEST(WeightCachePlace, IsTheSameForTheSame) {
  const CopiedModel model;
  const WeightCachePlace a = model.place(), b = model.place();
  EXPECT_EQ(a.path, b.path);
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.path.find(model.cache() + "/model-"), 0u) << a.path;
}

TEST(WeightCachePlace, AChangedCheckpointHasAnotherKeyAtTheSamePath) {
  const CopiedModel model;
  const WeightCachePlace base = model.place();
  const auto expect_other = [&](const char* what) {
    const WeightCachePlace other = model.place();
    EXPECT_EQ(other.path, base.path) << what;
    EXPECT_NE(other.key, base.key) << what;
  };
  const auto time = fs::last_write_time(model.weights());
  fs::last_write_time(model.weights(), time + std::chrono::nanoseconds(1000));
  expect_other("time");
  fs::last_write_time(model.weights(), time);
  EXPECT_EQ(model.place().key, base.key);
  {
    std::fstream file(model.weights(), std::ios::binary | std::ios::in | std::ios::out | std::ios::ate);
    file.seekp(file.tellp() * 15 / 16 + std::streamoff(2048));
    file.put('x');
  }
  fs::last_write_time(model.weights(), time);
  expect_other("a sampled byte");
}

TEST(WeightCachePlace, AChangedConfigurationHasAnotherKey) {
  const CopiedModel model;
  const WeightCachePlace base = model.place();
  std::ofstream(model.path() + "/config.json", std::ios::app) << "\n";
  EXPECT_NE(model.place().key, base.key);
}

TEST(WeightCachePlace, RanksAndPackingsHaveTheirOwn) {
  const CopiedModel model;
  EngineConfig tp2, ep2, q8, fp8, ref, f32;
  tp2.tp_size = ep2.tp_size = ep2.ep_size = 2;
  q8.dense_quant = "q8";
  fp8.dense_quant = "fp8";
  ref.moe_runner_backend = f32.moe_runner_backend = "ref";
  f32.dtype = "float32";
  std::vector<WeightCachePlace> places = {model.place(),       model.place(tp2, 0), model.place(tp2, 1),
                                          model.place(ep2, 0), model.place(ep2, 1), model.place(q8),
                                          model.place(fp8),    model.place(ref),    model.place(f32)};
  for (size_t a = 0; a < places.size(); ++a)
    for (size_t b = 0; b < a; ++b) {
      EXPECT_NE(places[a].path, places[b].path) << a << " " << b;
      EXPECT_NE(places[a].key, places[b].key) << a << " " << b;
    }
}

TEST(WeightCachePlace, NowhereForDummySmallOrUnwanted) {
  const CopiedModel model;
  EngineConfig none, dummy;
  none.weight_cache_dir = "none";
  dummy.load_format = "dummy";
  EXPECT_EQ(model.place(none).why_not, "--weight-cache-dir none");
  EXPECT_EQ(model.place(dummy).why_not, "dummy weights");
  EngineConfig flags;
  flags.model_path = model.path();
  const auto plan = plan_model(*load_model_config(model.path()), flags);
  const WeightCachePlace small = weight_cache_place(*Checkpoint::open(model.path()), *plan, {});
  EXPECT_EQ(small.path, "");
  EXPECT_EQ(small.why_not, "less than 256.00 MiB (--weight-cache-dir DIR keeps them)");
}

// ---- the engine -----------------------------------------------------------------------------------

struct Answer {
  std::vector<int32_t> tokens;
  int64_t weight_bytes = 0;
  std::string lines;
};

Answer answer(const EngineConfig& config) {
  std::mutex mutex;
  Answer answer;
  EngineConfig flags = config;
  flags.log_sink = [&](LogLevel, const std::string& line) {
    const std::lock_guard lock(mutex);
    answer.lines += line + "\n";
  };
  {
    const auto engine = Engine::make(flags);
    EXPECT_TRUE(engine.ok()) << engine.status().to_string();
    if (!engine.ok()) return answer;
    answer.weight_bytes = (*engine)->info().weight_bytes;
    std::promise<void> done;
    const SamplingParams greedy{.temperature = 0, .max_new_tokens = 16, .ignore_eos = true};
    const auto id = (*engine)->submit({"", {3, 1, 4, 1, 5}, greedy}, [&](const Delta& delta) {
      answer.tokens.insert(answer.tokens.end(), delta.token_ids.begin(), delta.token_ids.end());
      if (delta.finish_reason != FinishReason::kNone) done.set_value();
    });
    EXPECT_TRUE(id.ok());
    done.get_future().wait();
  }
  set_log_sink({});
  return answer;
}

struct EngineCase {
  const char* model;
  int tp = 1, ep = 1;
  const char* dense_quant = "none";
};

class EngineWithWeightCache : public testing::TestWithParam<EngineCase> {
 protected:
  static EngineConfig small_engine() {
    EngineConfig flags;
    flags.model_path = std::string(FP4MOE_MODELS) + "/" + GetParam().model;
    flags.threads = 2;
    flags.max_total_tokens = 256;
    flags.disable_autotune = true;
    flags.tp_size = GetParam().tp;
    flags.ep_size = GetParam().ep;
    flags.dense_quant = GetParam().dense_quant;
    return flags;
  }
};

TEST_P(EngineWithWeightCache, AnswersTheSameFromPackedAndMappedWeights) {
  const TempFolder folder;
  EngineConfig flags = small_engine();
  flags.weight_cache_dir = "none";
  const Answer none = answer(flags);
  flags.weight_cache_dir = folder.path();
  const Answer first = answer(flags), second = answer(flags);
  EXPECT_NE(none.lines.find("not kept: --weight-cache-dir none"), std::string::npos) << none.lines;
  EXPECT_NE(first.lines.find("written to '" + folder.path()), std::string::npos) << first.lines;
  EXPECT_NE(second.lines.find("mapped from '" + folder.path()), std::string::npos) << second.lines;
  EXPECT_EQ(second.lines.find("packed"), std::string::npos) << second.lines;
  EXPECT_EQ(none.tokens.size(), 16u);
  EXPECT_EQ(first.tokens, none.tokens);
  EXPECT_EQ(second.tokens, none.tokens);
  EXPECT_EQ(first.weight_bytes, none.weight_bytes);
  EXPECT_EQ(second.weight_bytes, none.weight_bytes);
  const auto num_files = std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator());
  EXPECT_EQ(num_files, GetParam().tp) << "each rank must write one file";
}

// Changes 3095 bytes of each rank's file, spread over its weights.
TEST_P(EngineWithWeightCache, ADamagedFileIsRefusedAndAnswersAreTheSame) {
  const TempFolder folder;
  EngineConfig flags = small_engine();
  flags.weight_cache_dir = folder.path();
  const Answer first = answer(flags);
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    std::fstream file(entry.path(), std::ios::binary | std::ios::in | std::ios::out);
    const int64_t num_bytes = static_cast<int64_t>(entry.file_size()), apart = num_bytes / 2 / 3095;
    for (int64_t i = 0; i < 3095; ++i) {
      const int64_t place = num_bytes / 4 + i * apart;
      file.seekg(place);
      const int byte = file.get();
      file.seekp(place);
      file.put(static_cast<char>(byte ^ 0x55));
    }
    ASSERT_TRUE(file.good());
  }
  const Answer damaged = answer(flags), after = answer(flags);
  EXPECT_EQ(damaged.tokens, first.tokens);
  EXPECT_NE(damaged.lines.find(" bytes) is damaged: checksum "), std::string::npos) << damaged.lines;
  EXPECT_NE(damaged.lines.find("; it will be rewritten"), std::string::npos) << damaged.lines;
  EXPECT_NE(damaged.lines.find("written to '" + folder.path()), std::string::npos) << damaged.lines;
  EXPECT_EQ(after.tokens, first.tokens);
  EXPECT_NE(after.lines.find("mapped from '" + folder.path()), std::string::npos) << after.lines;
}

INSTANTIATE_TEST_SUITE_P(Models, EngineWithWeightCache,
                         testing::Values(EngineCase{"demo-gptoss-mxfp4"}, EngineCase{"demo-dsv3-nvfp4"},
                                         EngineCase{"demo-gptoss-mxfp4", 1, 1, "q8"},
                                         EngineCase{"demo-gptoss-mxfp4", 1, 1, "fp8"},
                                         EngineCase{"demo-gptoss-mxfp4", 2, 1},
                                         EngineCase{"demo-dsv3-nvfp4", 2, 2}));

}  // namespace
}  // namespace fp4moe
