// The file of packed weights: which contents a load accepts, and which users may write the file.
#include "engine/startup/weight_cache.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/hash.h"
#include "base/log.h"
#include "engine/startup/user_cache.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

namespace fs = std::filesystem;

// Captures log lines during its lifetime.
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

// Three weights of different sizes; `salt` changes their contents.
constexpr int64_t kSizes[] = {5000, 64, 4096};
uint8_t byte_of(size_t weight, int64_t i, uint8_t salt) {
  return static_cast<uint8_t>(i * 7 + static_cast<int64_t>(weight) * 31 + salt);
}

struct Loaded {
  bool packed = false;
  std::vector<Buffer> weights;
};

// Takes weights from the cache like a model.
Loaded load(WeightCache& cache, uint8_t salt = 0) {
  Loaded loaded;
  for (size_t w = 0; w < std::size(kSizes); ++w) {
    cache.enter_part("layer " + std::to_string(w));
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
  // Returns whether the weights were packed; always checks their contents.
  bool start(const std::string& key = "model A\nrank 0\n", uint8_t salt = 0) {
    WeightCache cache({path_, "", key}, pool_);
    const Loaded loaded = load(cache, salt);
    expect_weights(loaded, salt);
    return loaded.packed;
  }
  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Replaces the cached file, which is read-only.
  void put(const std::string& bytes) const {
    fs::remove(path_);
    std::ofstream(path_, std::ios::binary) << bytes;
    fs::permissions(path_, fs::perms::owner_read | fs::perms::owner_write);
  }
  // Checks that a start refuses the file for this reason and packs and caches the weights again, and that the
  // next start maps the file.
  void expect_refused(const std::string& reason) {
    const Lines lines;
    EXPECT_TRUE(start()) << reason;
    EXPECT_TRUE(lines.have("warning: weight cache '" + path_ + "' is not used: ")) << lines.text();
    EXPECT_TRUE(lines.have(reason)) << lines.text();
    EXPECT_TRUE(lines.have("it will be rewritten")) << lines.text();
    EXPECT_FALSE(start()) << reason;
  }

  ThreadPool pool_{1};  // starts no threads, because tests fork
  const TempFolder folder_;
  const std::string path_ = folder_.file("sub/weights");
};

TEST_F(WeightCacheFile, IsPackedOnceAndMappedThen) {
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(lines.have("written to '" + path_ + "'")) << lines.text();
  EXPECT_FALSE(start());
  EXPECT_FALSE(start());
  EXPECT_TRUE(lines.have("mapped from '" + path_ + "'")) << lines.text();
  EXPECT_FALSE(lines.have("warning")) << lines.text();
}

TEST_F(WeightCacheFile, WeightsOutliveTheFilesName) {
  start();
  WeightCache cache({path_, "", "model A\nrank 0\n"}, pool_);
  const Loaded loaded = load(cache);
  fs::remove(path_);
  start("model A\nrank 0\n", 9);
  expect_weights(loaded);
}

TEST_F(WeightCacheFile, AnotherKeyIsRefused) {
  start();
  const Lines lines;
  EXPECT_TRUE(start("model A\nrank 1\n", 3));
  EXPECT_TRUE(lines.have("it was made for 'rank 0', but this run needs 'rank 1'")) << lines.text();
  EXPECT_FALSE(start("model A\nrank 1\n", 3));
  EXPECT_TRUE(start("model A\nrank 1\nmore\n", 4)) << "a longer key must be another key";
}

TEST_F(WeightCacheFile, EveryTruncationIsRefused) {
  start();
  const std::string whole = bytes();
  for (size_t n = 0; n < whole.size(); n += n < 64 || n + 64 > whole.size() ? 1 : 509) {
    put(whole.substr(0, n));
    expect_refused("");
  }
}

// Flips bytes in each region of the file: the header and the rest of its page, every weight, padding, the
// index.
TEST_F(WeightCacheFile, EveryFlippedByteIsRefused) {
  start();
  const std::string whole = bytes();
  size_t num_flips = 0;
  for (size_t place = 0; place < whole.size(); place += place < 64 || place > whole.size() - 128 ? 1 : 61) {
    std::string flipped = whole;
    flipped[place] = static_cast<char>(flipped[place] ^ 1 << place % 8);
    put(flipped);
    const Lines lines;
    const WeightCache cache({path_, "", "model A\nrank 0\n"}, pool_);
    ASSERT_TRUE(cache.packs()) << "byte " << place;
    ASSERT_TRUE(lines.have("is not used: ")) << lines.text();
    ++num_flips;
  }
  EXPECT_GT(num_flips, 400u);
}

TEST_F(WeightCacheFile, ADamagedWeightIsNamedWithItsLayerAndBothChecksums) {
  start();
  const std::string whole = bytes();
  // Offsets of the weights: 5000, 64 and 4096 bytes, each aligned to 4096.
  const size_t begins[] = {4096, 12288, 16384};
  for (size_t w = 0; w < std::size(begins); ++w) {
    const std::span<const uint8_t> weight(reinterpret_cast<const uint8_t*>(whole.data()) + begins[w],
                                          static_cast<size_t>(kSizes[w]));
    char written[17];
    std::snprintf(written, sizeof written, "%016llx",
                  static_cast<unsigned long long>(weight_checksum(weight, pool_)));
    std::string damaged = whole;
    for (size_t i = 0; i < weight.size(); i += 3)
      damaged[begins[w] + i] = static_cast<char>(~damaged[begins[w] + i]);
    put(damaged);
    expect_refused("layer " + std::to_string(w) + " (weight " + std::to_string(w) + " of 3, " +
                   std::to_string(kSizes[w]) + " bytes) is damaged: checksum ");
    put(damaged);
    expect_refused(std::string(", expected ") + written);
  }
  std::string padded = whole;
  padded[12287] = 1;
  put(padded);
  expect_refused("layer 0 (weight 0 of 3, 5000 bytes) is damaged: its padding is not zero");
}

// A checksum's blocks are distributed over threads.
TEST(WeightChecksum, IsTheSameForAnyNumberOfThreads) {
  std::vector<uint8_t> weight((5 << 20) + 12345);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<uint8_t>(i * 2654435761 >> 13);
  ThreadPool one(1), three(3);
  const uint64_t checksum = weight_checksum(weight, one);
  EXPECT_EQ(weight_checksum(weight, three), checksum);
  for (const size_t place : {size_t{0}, size_t{1} << 20, weight.size() - 1}) {
    weight[place] ^= 0x10;
    EXPECT_NE(weight_checksum(weight, three), checksum) << place;
    weight[place] ^= 0x10;
  }
  std::swap_ranges(weight.begin(), weight.begin() + (1 << 20), weight.begin() + (1 << 20));
  EXPECT_NE(weight_checksum(weight, three), checksum) << "blocks in another order";
  EXPECT_NE(weight_checksum(std::span(weight).first(100), one),
            weight_checksum(std::span(weight).first(101), one));
}

TEST_F(WeightCacheFile, AnotherVersionIsRefused) {
  start();
  std::string other = bytes();
  other[8] = 1;
  put(other);
  expect_refused("its format has version 1, but this binary writes 2");
}

TEST_F(WeightCacheFile, AnotherSizeIsRefused) {
  start();
  const std::string whole = bytes();
  put(whole + "x");
  expect_refused("it has " + std::to_string(whole.size() + 1) + " bytes, but " +
                 std::to_string(whole.size()) + " were written");
}

// Forged files whose hashes are valid but whose offsets are not.
TEST_F(WeightCacheFile, PlacesPastTheFileAreRefused) {
  start();
  const std::string whole = bytes();
  WeightFileHeader header;
  std::memcpy(&header, whole.data(), sizeof header);
  const auto put_forged = [&](WeightFileHeader forged, std::string file) {
    forged.index_hash =
        hash64(file.data() + header.index_offset, static_cast<int64_t>(file.size() - header.index_offset));
    forged.header_hash = hash64(&forged, offsetof(WeightFileHeader, header_hash));
    std::memcpy(file.data(), &forged, sizeof forged);
    put(file);
  };
  for (uint64_t WeightFileHeader::*field :
       {&WeightFileHeader::index_offset, &WeightFileHeader::key_bytes, &WeightFileHeader::names_bytes})
    for (const uint64_t value : {whole.size() + 1, header.index_offset + 1, uint64_t{1} << 63,
                                 ~uint64_t{0} - 4095, ~uint64_t{0}, uint64_t{0}}) {
      WeightFileHeader forged = header;
      forged.*field = value;
      put_forged(forged, whole);
      expect_refused("its index does not end where the file does");
    }
  for (const uint32_t value : {uint32_t{0}, uint32_t{2}, ~uint32_t{0}}) {
    WeightFileHeader forged = header;
    forged.num_weights = value;
    put_forged(forged, whole);
    expect_refused("its index does not end where the file does");
  }
  const auto refuse_record = [&](uint64_t WeightRecord::*field, uint64_t value, const std::string& reason) {
    WeightRecord record;
    std::string forged = whole;
    char* const at = forged.data() + header.index_offset + header.key_bytes;
    std::memcpy(&record, at, sizeof record);
    record.*field = value;
    std::memcpy(at, &record, sizeof record);
    put_forged(header, forged);
    expect_refused(reason);
  };
  for (const uint64_t value :
       {header.index_offset, uint64_t{1} << 63, ~uint64_t{0}, uint64_t{0}, uint64_t{8193}})
    refuse_record(&WeightRecord::num_bytes, value, "its weights do not end where its index begins");
  for (const uint64_t value : {uint64_t{3}, ~uint64_t{0}})
    refuse_record(&WeightRecord::part, value, "a weight belongs to part " + std::to_string(value) + " of 3");
  std::string cut = whole;
  cut.back() = 'x';
  put_forged(header, cut);
  expect_refused("the last name in its index is cut off");
}

TEST_F(WeightCacheFile, AForeignFileIsRefused) {
  fs::create_directories(folder_.file("sub"));
  put(std::string(10000, 'x'));
  expect_refused("it is not a file of packed weights");
}

// ---- who may write the file -----------------------------------------------------------------------

TEST_F(WeightCacheFile, ASymbolicLinkIsNotFollowed) {
  start();
  const std::string elsewhere = folder_.file("elsewhere"), content = bytes();
  fs::rename(path_, elsewhere);
  fs::create_symlink(elsewhere, path_);
  expect_refused("'" + path_ + "' is a symbolic link");
  EXPECT_FALSE(fs::is_symlink(path_)) << "the link was not replaced";
  std::ifstream file(elsewhere, std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), content)
      << "the link's target has changed";
}

TEST_F(WeightCacheFile, ThePartialFileIsNoLinkEither) {
  fs::create_directories(folder_.file("sub"));
  fs::permissions(folder_.file("sub"), fs::perms::owner_all);
  const std::string victim = folder_.file("victim");
  ASSERT_TRUE(write_text_file(victim, "precious").ok());
  fs::create_symlink(victim, path_ + ".partial");
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(lines.have("it is a symbolic link, which is not followed")) << lines.text();
  EXPECT_EQ(*read_text_file(victim, 100), "precious");
}

TEST_F(WeightCacheFile, AFileThatOthersCanWriteIsRefused) {
  for (const fs::perms others : {fs::perms::group_write, fs::perms::others_write}) {
    start();
    fs::permissions(path_, others, fs::perm_options::add);
    expect_refused("users other than its owner can write to it");
  }
}

TEST_F(WeightCacheFile, AnotherUsersFileIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  start();
  ASSERT_EQ(::chown(path_.c_str(), 65534, 65534), 0);
  expect_refused("belongs to user 65534; legal: 0 (this process's user) or 0");
}

TEST_F(WeightCacheFile, AFolderThatOthersCanWriteToIsNotUsed) {
  start();
  const std::string folder = folder_.file("sub");
  fs::permissions(folder, fs::perms::others_write, fs::perm_options::add);
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(lines.have("warning: packed weights are not kept: '" + folder +
                         "' has mode 0702: users other than its owner "
                         "can write to it"))
      << lines.text();
  fs::permissions(folder, fs::perms::owner_all);
  EXPECT_FALSE(start()) << "the file was not mapped";
}

TEST_F(WeightCacheFile, FolderAndFileAreTheUsersAlone) {
  start();
  EXPECT_EQ(fs::status(folder_.file("sub")).permissions(), fs::perms::owner_all);
  EXPECT_EQ(fs::status(path_).permissions(), fs::perms::owner_read)
      << "a writer could truncate the mapped file";
}

// ---- writing --------------------------------------------------------------------------------------

// If many starts run at once, each gets its weights, and the file is complete.
TEST_F(WeightCacheFile, StartsAtTheSameTimeLeaveOneWholeFile) {
  std::vector<std::thread> starts;
  const Lines lines;
  for (int i = 0; i < 8; ++i)
    starts.emplace_back([&] {
      ThreadPool pool(1);
      WeightCache cache({path_, "", "model A\nrank 0\n"}, pool);
      expect_weights(load(cache));
    });
  for (std::thread& s : starts) s.join();
  EXPECT_FALSE(lines.have("is not used")) << lines.text();
  EXPECT_FALSE(file_exists(path_ + ".partial"));
  EXPECT_FALSE(start()) << lines.text();
}

TEST_F(WeightCacheFile, WhatAKilledStartLeftIsNotTrusted) {
  const pid_t child = ::fork();
  if (child == 0) {
    WeightCache cache({path_, "", "model A\nrank 0\n"}, pool_);
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
    WeightCache cache({path_, "", "model A\nrank 0\n"}, pool_);
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
  EXPECT_TRUE(
      lines.have("warning: packed weights are not kept: '" + path_ + ".partial' is locked by another writer"))
      << lines.text();
  EXPECT_TRUE(lines.have("not kept: '" + path_)) << lines.text();
  EXPECT_FALSE(file_exists(path_));
}

TEST_F(WeightCacheFile, AFolderThatCannotBeWrittenIsAWarning) {
  ASSERT_TRUE(write_text_file(folder_.file("sub"), "").ok());  // a file where a folder is needed
  const Lines lines;
  EXPECT_TRUE(start());
  EXPECT_TRUE(
      lines.have("warning: packed weights are not kept: '" + folder_.file("sub") + "' is not a folder"))
      << lines.text();
}

TEST_F(WeightCacheFile, AFileSizeLimitIsAWarning) {
  const pid_t child = ::fork();  // the limit applies to the whole process
  if (child == 0) {
    const rlimit limit = {8192, 8192};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Lines lines;
    const bool packed = start();
    const bool warned =
        lines.have("warning: packed weights are not kept: cannot write '" + path_ + "': it would have ") &&
        lines.have("the limit for this process is 8192 (ulimit -f)");
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
    WeightCache cache({path_, "", "model A\nrank 0\n"}, pool_);
    const Status status = cache.next(5001, [](uint8_t*) { return Status(); }).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_NE(status.message().find("holds 3 weights, but the model needs 5001 bytes as weight 0"),
              std::string::npos)
        << status.message();
  }
  WeightCache cache({path_, "", "model A\nrank 0\n"}, pool_);
  EXPECT_TRUE(cache.next(kSizes[0], [](uint8_t*) { return Status(); }).ok());
  EXPECT_EQ(cache.finish().code(), StatusCode::kDataLoss) << "two weights were not taken";
}

TEST(WeightCacheNowhere, SaysWhy) {
  const Lines lines;
  ThreadPool pool(1);
  WeightCache cache({"", "dummy weights", ""}, pool);
  EXPECT_TRUE(load(cache).packed);
  EXPECT_TRUE(lines.have("not kept: dummy weights")) << lines.text();
}

TEST(UserCache, ARelativeFolderCountsAsNotSet) {
  const char* before = std::getenv("XDG_CACHE_HOME");
  const std::string saved = before == nullptr ? "" : before;
  ::unsetenv("XDG_CACHE_HOME");
  const std::string fallback = user_cache_folder();
  ::setenv("XDG_CACHE_HOME", "caches", 1);
  EXPECT_EQ(user_cache_folder(), fallback);
  ::setenv("XDG_CACHE_HOME", "/caches", 1);
  EXPECT_EQ(user_cache_folder(), "/caches/fp4moe");
  before == nullptr ? ::unsetenv("XDG_CACHE_HOME") : ::setenv("XDG_CACHE_HOME", saved.c_str(), 1);
}

}  // namespace
}  // namespace fp4moe
