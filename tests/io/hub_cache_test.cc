// Models in a hub cache as huggingface_hub writes it: snapshots of links to blobs, and refs that name
// commits.
#include "io/hub_cache.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "io/checkpoint/checkpoint.h"
#include "io/file.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

namespace fs = std::filesystem;

constexpr char kCommit[] = "0123456789abcdef0123456789abcdef01234567";
constexpr char kOlder[] = "89abcdef0123456789abcdef0123456789abcdef";
constexpr char kIndex[] = "model.safetensors.index.json";

std::string variables(const std::map<std::string, std::string>& values) {
  return hub_cache_folder([&](const char* name) -> const char* {
    const auto at = values.find(name);
    return at == values.end() ? nullptr : at->second.c_str();
  });
}

// A cache with acme/tiny in two revisions, main and v1.
class HubCache : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* folder : {"blobs", "refs/refs/pr"}) fs::create_directories(repository() + "/" + folder);
    for (const char* commit : {kCommit, kOlder}) {
      fs::create_directories(snapshot(commit));
      link(commit, "config.json", "{}");
    }
    write("refs/main", std::string(kCommit));
    write("refs/v1", std::string(kOlder) + "\n");
    write("refs/refs/pr/7", std::string(kOlder));
  }

  void write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(is_ok(write_text_file(repository() + "/" + name, text)));
  }
  // A file of a snapshot: a relative link to a blob.
  void link(const std::string& commit, const std::string& name, const std::string& text) {
    const std::string blob = "blobs/" + commit + "-" + name;
    write(blob, text);
    fs::create_symlink("../../" + blob, snapshot(commit) + "/" + name);
  }

  std::string cache() const { return folder_.path(); }
  std::string repository() const { return cache() + "/models--acme--tiny"; }
  std::string snapshot(const std::string& commit) const { return repository() + "/snapshots/" + commit; }
  Result<FoundModel> find(const std::string& model, const std::string& revision = "") const {
    return find_model(model, revision, cache());
  }
  void expect(const Result<FoundModel>& found, const std::string& path, const std::string& name) const {
    ASSERT_TRUE(is_ok(found));
    EXPECT_EQ(fs::path(found->path).lexically_normal(), fs::path(path).lexically_normal());
    EXPECT_EQ(found->name, name);
  }

 private:
  const TempFolder folder_;
};

TEST(HubCacheFolder, FollowsTheVariablesOfHuggingFace) {
  EXPECT_EQ(variables({{"HF_HUB_CACHE", "/a"}, {"HF_HOME", "/b"}, {"HOME", "/c"}}), "/a");
  EXPECT_EQ(variables({{"HF_HUB_CACHE", ""}, {"HF_HOME", "/b"}, {"HOME", "/c"}}), "/b/hub");
  EXPECT_EQ(variables({{"HOME", "/c"}}), "/c/.cache/huggingface/hub");
}

TEST_F(HubCache, FindsRevisions) {
  expect(find("acme/tiny"), snapshot(kCommit), "acme/tiny");
  expect(find("acme/tiny", "main"), snapshot(kCommit), "acme/tiny");
  expect(find("acme/tiny", "v1"), snapshot(kOlder), "acme/tiny");
  expect(find("acme/tiny", "refs/pr/7"), snapshot(kOlder), "acme/tiny");
  expect(find("acme/tiny", kOlder), snapshot(kOlder), "acme/tiny");
}

TEST_F(HubCache, FindsAnIdWithoutAnOrganisation) {
  fs::create_directories(cache() + "/models--gpt2/snapshots/" + kCommit);
  expect(find("gpt2", kCommit), cache() + "/models--gpt2/snapshots/" + kCommit, "gpt2");
}

TEST_F(HubCache, UnderstandsItsOwnFolders) {
  expect(find(repository()), snapshot(kCommit), "acme/tiny");
  expect(find(repository() + "/"), snapshot(kCommit), "acme/tiny");
  expect(find(repository(), "v1"), snapshot(kOlder), "acme/tiny");
  expect(find(snapshot(kOlder)), snapshot(kOlder), "acme/tiny");
  expect(find(snapshot(kOlder) + "/"), snapshot(kOlder) + "/", "acme/tiny");
}

TEST_F(HubCache, LeavesOtherPathsAlone) {
  fs::create_directories(cache() + "/plain/snapshots/a");
  expect(find(cache() + "/plain"), cache() + "/plain", "");
  expect(find(cache() + "/plain/snapshots/a"), cache() + "/plain/snapshots/a", "");
  for (const char* missing : {"/no/such/folder", "./a/b", "../a", "a/b/c", "a//b", "-a", "a--b/c", ""})
    expect(find(missing), missing, "");
  EXPECT_TRUE(fails_with(find(cache() + "/plain", "v1"), StatusCode::kInvalidArgument, {"--revision v1"}));
  EXPECT_TRUE(fails_with(find(snapshot(kOlder), "v1"), StatusCode::kInvalidArgument, {"--revision v1"}));
}

TEST_F(HubCache, APathWins) {
  const fs::path before = fs::current_path();
  fs::create_directories(cache() + "/here/acme/tiny");
  fs::current_path(cache() + "/here");
  expect(find("acme/tiny"), "acme/tiny", "");
  fs::current_path(before);
}

TEST_F(HubCache, NamesTheSearchedFoldersAndTheDownload) {
  EXPECT_TRUE(fails_with(find("acme/other"), StatusCode::kNotFound,
                         {"'acme/other'", cache() + "/models--acme--other", "`hf download acme/other`"}));
  EXPECT_TRUE(
      fails_with(find("acme/tiny", "v2"), StatusCode::kNotFound,
                 {repository() + "/refs/v2", snapshot("v2"), "`hf download acme/tiny --revision v2`"}));
  fs::remove_all(snapshot(kCommit));
  EXPECT_TRUE(
      fails_with(find("acme/tiny"), StatusCode::kNotFound, {snapshot(kCommit), "`hf download acme/tiny`"}));
}

TEST_F(HubCache, RefusesHostileRevisionsAndRefs) {
  for (const std::string& bad : {std::string("../../x"), std::string("/etc"), std::string("a b"),
                                 std::string("a/"), std::string(300, 'a'), std::string("a\n")})
    EXPECT_TRUE(fails_with(find("acme/tiny", bad), StatusCode::kInvalidArgument, {"--revision"})) << bad;
  for (const char* text : {"", "../..", "a/b", "/etc"}) {
    write("refs/bad", text);
    EXPECT_TRUE(fails_with(find("acme/tiny", "bad"), StatusCode::kDataLoss, {"refs/bad"})) << text;
  }
  write("refs/bad", std::string(5000, 'a'));
  EXPECT_TRUE(fails_with(find("acme/tiny", "bad"), StatusCode::kDataLoss, {"refs/bad"}));
  EXPECT_TRUE(fails_with(find("acme/tiny", "refs/pr"), StatusCode::kNotFound, {"refs/refs/pr"}));
}

// `hf download` links a file when its blob is complete, so an interrupted download lacks some of the links.
TEST_F(HubCache, APartialDownloadIsNamedByTheCheckpointsChecks) {
  link(kCommit, kIndex, R"({"weight_map": {"a": "model-00001-of-00001.safetensors"}})");
  write("blobs/abc.incomplete", "half");
  const Result<FoundModel> found = find("acme/tiny");
  ASSERT_TRUE(is_ok(found));
  EXPECT_TRUE(Checkpoint::has_weights(found->path));
  EXPECT_TRUE(fails_with(Checkpoint::open(found->path), StatusCode::kNotFound,
                         {"model-00001-of-00001.safetensors", "is missing", found->path}));
  // A link without its blob is a missing shard too.
  fs::create_symlink("../../blobs/gone", found->path + "/model-00001-of-00001.safetensors");
  EXPECT_TRUE(fails_with(Checkpoint::open(found->path), StatusCode::kNotFound,
                         {"model-00001-of-00001.safetensors", "is missing"}));
}

}  // namespace
}  // namespace fp4moe
