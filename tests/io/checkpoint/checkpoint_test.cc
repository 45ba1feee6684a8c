#include "io/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "io/checkpoint/checkpoint_index.h"
#include "io/checkpoint/safetensors.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

// Tensor "t<i>" is [2, i + 1] U8 and holds i in every byte.
std::vector<TensorSpec> make_specs(int num_tensors) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < num_tensors; ++i) specs.push_back({"t" + std::to_string(i), DType::kU8, {2, i + 1}});
  return specs;
}

Status fill(const TensorSpec& spec, const ByteSink& sink) {
  const uint8_t value = static_cast<uint8_t>(spec.shape[1] - 1);
  return sink(std::vector<uint8_t>(static_cast<size_t>(2 * spec.shape[1]), value));
}

void expect_whole(const Checkpoint& checkpoint, int num_tensors) {
  EXPECT_EQ(checkpoint.tensors().size(), static_cast<size_t>(num_tensors));
  EXPECT_EQ(checkpoint.total_bytes(), num_tensors * (num_tensors + 1));
  for (int i = 0; i < num_tensors; ++i) {
    const auto view = checkpoint.get("t" + std::to_string(i), DType::kU8, {2, i + 1});
    ASSERT_TRUE(is_ok(view));
    for (int64_t byte = 0; byte < view->num_bytes(); ++byte) EXPECT_EQ(view->data[byte], i);
    checkpoint.will_need(*view);
    checkpoint.release(*view);
    EXPECT_EQ(view->data[0], i);  // released bytes are read from the file again
  }
}

TEST(Checkpoint, OpensOneFileAndAnyNumberOfShards) {
  for (const int num_shards : {1, 2, 3, 7}) {
    const TempFolder folder;
    ASSERT_TRUE(is_ok(write_safetensors_shards(folder.path(), make_specs(7), num_shards, fill)));
    const auto checkpoint = Checkpoint::open(folder.path());
    ASSERT_TRUE(is_ok(checkpoint)) << num_shards;
    expect_whole(*checkpoint, 7);
    EXPECT_EQ(checkpoint->find("absent"), nullptr);
    EXPECT_EQ(checkpoint->find("t6")->file, num_shards == 1
                                                ? "model.safetensors"
                                                : "model-0000" + std::to_string(num_shards) + "-of-0000" +
                                                      std::to_string(num_shards) + ".safetensors");
  }
}

TEST(Checkpoint, SurvivesBeingMoved) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(write_safetensors_shards(folder.path(), make_specs(3), 2, fill)));
  auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(is_ok(checkpoint));
  const Checkpoint moved = std::move(checkpoint).value();
  expect_whole(moved, 3);
}

TEST(Checkpoint, GetNamesBothSides) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(write_safetensors_shards(folder.path(), make_specs(1), 1, fill)));
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(is_ok(checkpoint));
  EXPECT_TRUE(
      fails_with(checkpoint->get("x", DType::kU8, {2, 1}), StatusCode::kNotFound, {"'x'", folder.path()}));
  EXPECT_TRUE(fails_with(checkpoint->get("t0", DType::kBF16, {2, 1}), StatusCode::kInvalidArgument,
                         {"'t0'", "U8 [2, 1]", "BF16 [2, 1]"}));
  EXPECT_TRUE(fails_with(checkpoint->get("t0", DType::kU8, {2}), StatusCode::kInvalidArgument,
                         {"'t0'", "U8 [2, 1]", "U8 [2]"}));
}

TEST(Checkpoint, NamesWhatIsMissing) {
  const TempFolder folder;
  EXPECT_TRUE(fails_with(Checkpoint::open("/nonexistent"), StatusCode::kNotFound, {"/nonexistent"}));
  EXPECT_TRUE(fails_with(Checkpoint::open(folder.path()), StatusCode::kNotFound,
                         {folder.path(), "model.safetensors", "model.safetensors.index.json"}));
  ASSERT_TRUE(is_ok(write_safetensors_shards(folder.path(), make_specs(4), 2, fill)));
  std::filesystem::remove(folder.file("model-00002-of-00002.safetensors"));
  EXPECT_TRUE(fails_with(Checkpoint::open(folder.path()), StatusCode::kNotFound,
                         {"model-00002-of-00002.safetensors", "'t3'", folder.path()}));
}

TEST(Checkpoint, RefusesTruncatedAndEmptyFiles) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(write_safetensors_shards(folder.path(), make_specs(4), 1, fill)));
  const std::string path = folder.file("model.safetensors");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_TRUE(fails_with(Checkpoint::open(folder.path()), StatusCode::kDataLoss, {path, "t3"}));
  std::filesystem::resize_file(path, 0);
  EXPECT_TRUE(fails_with(Checkpoint::open(folder.path()), StatusCode::kDataLoss, {path, "0 bytes"}));
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_TRUE(fails_with(Checkpoint::open(folder.path()), StatusCode::kDataLoss, {path, "regular file"}));
}

TEST(Checkpoint, ShardsAreRemovedIfOneCannotBeWritten) {
  const TempFolder folder;
  int num_tensors = 0;
  const Status status = write_safetensors_shards(
      folder.path(), make_specs(6), 3, [&](const TensorSpec& spec, const ByteSink& sink) -> Status {
        if (++num_tensors == 5) return data_loss("the source ends here");
        EXPECT_TRUE(file_exists(folder.file(std::string(kIndexName) + ".partial")));
        return fill(spec, sink);
      });
  EXPECT_EQ(status.message(), "the source ends here");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Checkpoint, RefusesAnIndexThatContradictsTheShards) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(write_safetensors(folder.file("a.safetensors"), make_specs(1), fill)));
  ASSERT_TRUE(is_ok(write_safetensors(folder.file("b.safetensors"), {{"x", DType::kU8, {2, 1}}}, fill)));
  const auto open_with = [&](const std::string& map) {
    EXPECT_TRUE(
        is_ok(write_text_file(folder.file("model.safetensors.index.json"), "{\"weight_map\":" + map + "}")));
    return Checkpoint::open(folder.path());
  };
  EXPECT_TRUE(is_ok(open_with(R"({"t0":"a.safetensors","x":"b.safetensors"})")));
  EXPECT_TRUE(fails_with(open_with(R"({"t0":"b.safetensors","x":"a.safetensors"})"), StatusCode::kDataLoss,
                         {"'t0' in 'b.safetensors'", "it is in 'a.safetensors'"}));
  EXPECT_TRUE(fails_with(open_with(R"({"t0":"a.safetensors","y":"b.safetensors"})"), StatusCode::kDataLoss,
                         {"'y' in 'b.safetensors'", "lacks it"}));
  ASSERT_TRUE(is_ok(write_safetensors(folder.file("b.safetensors"), make_specs(2), fill)));
  EXPECT_TRUE(fails_with(open_with(R"({"t0":"a.safetensors","t1":"b.safetensors"})"), StatusCode::kDataLoss,
                         {"'t0'", "a.safetensors", "b.safetensors"}));
}

TEST(CheckpointIndex, RefusesFilesOutsideTheFolder) {
  for (const std::string file : {"../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "",
                                 ".safetensors", "x.bin", "a\\\\b.safetensors", "a\\u0000.safetensors"})
    EXPECT_TRUE(fails_with(parse_checkpoint_index(R"({"weight_map":{"t":")" + file + "\"}}"),
                           StatusCode::kInvalidArgument, {"weight_map['t']", "same folder"}))
        << file;
  for (const char* text :
       {"", "[]", "{}", R"({"weight_map":{}})", R"({"weight_map":[]})", R"({"weight_map":{"t":1}})",
        R"({"weight_map":{"t":"a.safetensors","t":"a.safetensors"}})"})
    EXPECT_TRUE(fails_with(parse_checkpoint_index(text), StatusCode::kDataLoss, {})) << text;
}

TEST(WriteSafetensorsShards, RefusesMoreShardsThanTensors) {
  const TempFolder folder;
  for (const int num_shards : {-1, 0, 4})
    EXPECT_TRUE(fails_with(write_safetensors_shards(folder.path(), make_specs(3), num_shards, fill),
                           StatusCode::kInvalidArgument, {"num_shards=" + std::to_string(num_shards), "3"}));
}

}  // namespace
}  // namespace fp4moe
