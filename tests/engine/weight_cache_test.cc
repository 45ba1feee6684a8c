// The file of packed weights: what it gives back, what it refuses, and that a model does not notice.
#include "engine/weight_cache.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>

#include "base/hash.h"
#include "base/log.h"
#include "fp4moe/engine.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

namespace fs = std::filesystem;

// What is logged while it lives.
class Lines {
 public:
  Lines() {
    set_log_sink([this](LogLevel level, const std::string& line) {
      const std::lock_guard lock(mutex_);
      text_ += (level == LogLevel::kWarning ? "warning: " : "") + line + "\n";
    });
  }
  ~Lines() { set_log_sink({}); }
  bool have(const std::string& part) const { return text().find(part) != std::string::npos; }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

// Three weights of different sizes; `salt` makes other ones.
constexpr int64_t kSizes[] = {5000, 64, 4096};
uint8_t byte_of(size_t weight, int64_t i, uint8_t salt) {
  return static_cast<uint8_t>(i * 7 + static_cast<int64_t>(weight) * 31 + salt);
}

struct Loaded {
  bool packed = false;
  std::vector<Buffer> weights;
};

// As a model loads them.
Loaded load(WeightCache& cache, uint8_t salt = 0) {
  Loaded loaded;
  for (size_t w = 0; w < std::size(kSizes); ++w) {
    Result<Buffer> weight = cache.next(kSizes[w], [&](uint8_t* to) -> Status {
      loaded.packed = true;
      for (int64_t i = 0; i < kSizes[w]; ++i) to[i] = byte_of(w, i, salt);
      return {};
    });
    EXPECT_TRUE(weight.ok()) << weight.status().to_string();
    if (weight.ok()) loaded.weights.push_back(std::move(*weight));
  }
  EXPECT_EQ(cache.packs(), loaded.packed);
  EXPECT_TRUE(cache.finish().ok());
  return loaded;
}

void expect_weights(const Loaded& loaded, uint8_t salt = 0) {
  ASSERT_EQ(loaded.weights.size(), std::size(kSizes));
  for (size_t w = 0; w < std::size(kSizes); ++w) {
    const Buffer& weight = loaded.weights[w];
    ASSERT_EQ(weight.num_bytes(), kSizes[w]);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weight.data()) % 64, 0u);
    for (int64_t i = 0; i < kSizes[w]; ++i)
      ASSERT_EQ(weight.data()[i], byte_of(w, i, salt)) << w << ": " << i;
  }
}

class WeightCacheFile : public testing::Test {
 protected:
  // Whether the weights were packed; right they are in any case.
  bool start(const std::string& key = "model A\nrank 0\n", uint8_t salt = 0) {
    WeightCache cache({path_, "", key});
    const Loaded loaded = load(cache, salt);
    expect_weights(loaded, salt);
    return loaded.packed;
  }
  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }
  // A start refuses the file with that reason, packs and keeps; the next one maps.
  void expect_refused(const std::string& reason) {
    const Lines lines;
    EXPECT_TRUE(start()) << reason;
    EXPECT_TRUE(lines.have("warning: weight cache '" + path_ + "' is not used: ")) << lines.text();
    EXPECT_TRUE(lines.have(reason)) << lines.text();
    EXPECT_TRUE(lines.have("it is written anew")) << lines.text();
    EXPECT_FALSE(start()) << reason;
  }

  const TempFolder folder_;
  const std::string path_ = folder_.file("sub/weights");
};

TEST_F(WeightCacheFile, IsPackedOnceAndMappedThen) {
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(lines.have("kept in '" + path_ + "'")) << lines.text();
  EXPECT_FALSE(start());
  EXPECT_FALSE(start());
  EXPECT_TRUE(lines.have("mapped from '" + path_ + "'")) << lines.text();
  EXPECT_FALSE(lines.have("warning")) << lines.text();
}

TEST_F(WeightCacheFile, WeightsOutliveTheFilesName) {
  start();
  WeightCache cache({path_, "", "model A\nrank 0\n"});
  const Loaded loaded = load(cache);
  fs::remove(path_);
  start("model A\nrank 0\n", 9);
  expect_weights(loaded);
}

TEST_F(WeightCacheFile, AnotherKeyIsRefused) {
  start();
  const Lines lines;
  EXPECT_TRUE(start("model A\nrank 1\n", 3));
  EXPECT_TRUE(lines.have("it was made for 'rank 0', this start is 'rank 1'")) << lines.text();
  EXPECT_FALSE(start("model A\nrank 1\n", 3));
  EXPECT_TRUE(start("model A\nrank 1\nmore\n", 4)) << "a key that goes on is another one";
}

TEST_F(WeightCacheFile, EveryTruncationIsRefused) {
  start();
  const std::string whole = bytes();
  for (size_t n = 0; n < whole.size(); n += n < 64 || n + 64 > whole.size() ? 1 : 509) {
    put(whole.substr(0, n));
    expect_refused("");
  }
}

TEST_F(WeightCacheFile, EveryFlippedBitOfHeaderAndIndexIsRefused) {
  start();
  const std::string whole = bytes();
  const size_t index_bytes = std::strlen("model A\nrank 0\n") + sizeof(uint64_t) * std::size(kSizes);
  std::vector<size_t> places(56);
  for (size_t i = 0; i < places.size(); ++i) places[i] = i;
  for (size_t i = 0; i < index_bytes; ++i) places.push_back(whole.size() - 1 - i);
  for (const size_t place : places)
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[place] = static_cast<char>(flipped[place] ^ 1 << bit);
      put(flipped);
      const Lines lines;
      const WeightCache cache({path_, "", "model A\nrank 0\n"});
      ASSERT_TRUE(cache.packs()) << "byte " << place << " bit " << bit;
      ASSERT_TRUE(lines.have("is not used: ")) << lines.text();
    }
}

TEST_F(WeightCacheFile, AnotherVersionIsRefused) {
  start();
  std::string other = bytes();
  other[8] = 2;
  put(other);
  expect_refused("its format has version 2, this binary writes 1");
}

TEST_F(WeightCacheFile, AnotherSizeIsRefused) {
  start();
  const std::string whole = bytes();
  put(whole + "x");
  expect_refused("it has " + std::to_string(whole.size() + 1) + " bytes, " + std::to_string(whole.size()) +
                 " were written");
}

// With hashes that are right, as only a program writes them.
TEST_F(WeightCacheFile, PlacesPastTheFileAreRefused) {
  start();
  const std::string whole = bytes();
  const auto u64_at = [](const std::string& from, size_t place) {
    uint64_t value;
    std::memcpy(&value, from.data() + place, sizeof value);
    return value;
  };
  const auto put_u64 = [](std::string& to, size_t place, uint64_t value) {
    std::memcpy(to.data() + place, &value, sizeof value);
  };
  constexpr size_t kIndexOffset = 24, kKeyBytes = 32, kIndexHash = 40, kHeaderHash = 48;
  for (const size_t place : {kIndexOffset, kKeyBytes})
    for (const uint64_t value : {whole.size() + 1, uint64_t{1} << 63, ~uint64_t{0}, uint64_t{0}}) {
      std::string forged = whole;
      put_u64(forged, place, value);
      put_u64(forged, kHeaderHash, hash64(forged.data(), kHeaderHash));
      put(forged);
      expect_refused("its index does not end where the file does");
    }
  const uint64_t index = u64_at(whole, kIndexOffset), sizes = index + u64_at(whole, kKeyBytes);
  for (const uint64_t value : {index, uint64_t{1} << 63, ~uint64_t{0}}) {
    std::string forged = whole;
    put_u64(forged, sizes, value);
    put_u64(forged, kIndexHash, hash64(forged.data() + index, static_cast<int64_t>(forged.size() - index)));
    put_u64(forged, kHeaderHash, hash64(forged.data(), kHeaderHash));
    put(forged);
    expect_refused("its weights do not end where its index begins");
  }
}

TEST_F(WeightCacheFile, AForeignFileIsRefused) {
  fs::create_directories(folder_.file("sub"));
  put(std::string(10000, 'x'));
  expect_refused("it is no file of packed weights");
}

TEST_F(WeightCacheFile, WhatAKilledStartLeftIsNotTrusted) {
  const pid_t child = ::fork();
  if (child == 0) {
    WeightCache cache({path_, "", "model A\nrank 0\n"});
    const Result<Buffer> weight = cache.next(kSizes[0], [](uint8_t*) { return Status(); });
    _exit(weight.ok() && file_exists(path_ + ".partial") ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(file_exists(path_ + ".partial"));
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_FALSE(start());
  EXPECT_FALSE(lines.have("warning")) << lines.text();
}

TEST_F(WeightCacheFile, ALoadThatFailsKeepsNothing) {
  {
    WeightCache cache({path_, "", "model A\nrank 0\n"});
    EXPECT_EQ(cache.next(64, [](uint8_t*) { return data_loss("bad scale"); }).status().message(),
              "bad scale");
  }
  EXPECT_FALSE(file_exists(path_));
  EXPECT_FALSE(file_exists(path_ + ".partial"));
}

TEST_F(WeightCacheFile, ASecondWriterPacksAndKeepsNothing) {
  fs::create_directories(folder_.file("sub"));
  const Result<NewFile> first = NewFile::create(path_);
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(lines.have("warning: packed weights are not kept: '" + path_ +
                         ".partial' is being written by somebody else"))
      << lines.text();
  EXPECT_TRUE(lines.have("not kept: '" + path_)) << lines.text();
  EXPECT_FALSE(file_exists(path_));
}

TEST_F(WeightCacheFile, AFolderThatCannotBeWrittenIsAWarning) {
  ASSERT_TRUE(write_text_file(folder_.file("sub"), "").ok());  // a file where a folder is wanted
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(lines.have("warning: packed weights are not kept: cannot create '" + path_)) << lines.text();
}

TEST_F(WeightCacheFile, AFullDiskIsAWarning) {
  const pid_t child = ::fork();  // the limit is the process's
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {8192, 8192};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Lines lines;
    const bool packed = start();
    const bool warned =
        lines.have("warning: packed weights are not kept: cannot write '" + path_ + "': no space left for ");
    _exit(packed && warned && !HasFailure() && !file_exists(path_) && !file_exists(path_ + ".partial") ? 0
                                                                                                       : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(WeightCacheFile, OtherWeightsThanTheModelsAreAnError) {
  start();
  {
    WeightCache cache({path_, "", "model A\nrank 0\n"});
    const Status status = cache.next(5001, [](uint8_t*) { return Status(); }).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_NE(status.message().find("holds 3 weights, but the model asks for 5001 bytes as weight 0"),
              std::string::npos)
        << status.message();
  }
  WeightCache cache({path_, "", "model A\nrank 0\n"});
  EXPECT_TRUE(cache.next(kSizes[0], [](uint8_t*) { return Status(); }).ok());
  EXPECT_EQ(cache.finish().code(), StatusCode::kDataLoss) << "two are left";
}

TEST(WeightCacheNowhere, SaysWhy) {
  const Lines lines;
  WeightCache cache({"", "dummy weights", ""});
  EXPECT_TRUE(load(cache).packed);
  EXPECT_TRUE(lines.have("not kept: dummy weights")) << lines.text();
}

// ---- the place ------------------------------------------------------------------------------------

// A copy of a demo checkpoint, its files' times unchanged.
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
  EngineConfig tp2, ep2, q8, ref, f32;
  tp2.tp_size = ep2.tp_size = ep2.ep_size = 2;
  q8.dense_quant = "q8";
  ref.moe_runner_backend = f32.moe_runner_backend = "ref";
  f32.dtype = "float32";
  std::vector<WeightCachePlace> places = {model.place(),       model.place(tp2, 0), model.place(tp2, 1),
                                          model.place(ep2, 0), model.place(ep2, 1), model.place(q8),
                                          model.place(ref),    model.place(f32)};
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

class EngineWithWeightCache : public testing::TestWithParam<EngineCase> {};

TEST_P(EngineWithWeightCache, AnswersTheSameFromPackedAndMappedWeights) {
  const TempFolder folder;
  EngineConfig flags;
  flags.model_path = std::string(FP4MOE_MODELS) + "/" + GetParam().model;
  flags.threads = 2;
  flags.max_total_tokens = 256;
  flags.disable_autotune = true;
  flags.tp_size = GetParam().tp;
  flags.ep_size = GetParam().ep;
  flags.dense_quant = GetParam().dense_quant;
  flags.weight_cache_dir = "none";
  const Answer none = answer(flags);
  flags.weight_cache_dir = folder.path();
  const Answer first = answer(flags), second = answer(flags);
  EXPECT_NE(none.lines.find("not kept: --weight-cache-dir none"), std::string::npos) << none.lines;
  EXPECT_NE(first.lines.find("kept in '" + folder.path()), std::string::npos) << first.lines;
  EXPECT_NE(second.lines.find("mapped from '" + folder.path()), std::string::npos) << second.lines;
  EXPECT_EQ(second.lines.find("packed"), std::string::npos) << second.lines;
  EXPECT_EQ(none.tokens.size(), 16u);
  EXPECT_EQ(first.tokens, none.tokens);
  EXPECT_EQ(second.tokens, none.tokens);
  EXPECT_EQ(first.weight_bytes, none.weight_bytes);
  EXPECT_EQ(second.weight_bytes, none.weight_bytes);
  const auto num_files = std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator());
  EXPECT_EQ(num_files, GetParam().tp) << "one a rank";
}

INSTANTIATE_TEST_SUITE_P(Models, EngineWithWeightCache,
                         testing::Values(EngineCase{"demo-gptoss-mxfp4"}, EngineCase{"demo-dsv3-nvfp4"},
                                         EngineCase{"demo-gptoss-mxfp4", 1, 1, "q8"},
                                         EngineCase{"demo-gptoss-mxfp4", 2, 1},
                                         EngineCase{"demo-dsv3-nvfp4", 2, 2}));

}  // namespace
}  // namespace fp4moe
