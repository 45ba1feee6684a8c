// Checkpoints of the same form, and the first difference of those with another one.
#include "io/checkpoint/checkpoint_form.h"

#include <gtest/gtest.h>

#include <fstream>

#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

class CheckpointForms : public testing::Test {
 protected:
  std::string make(const std::string& name, MakeTinyOptions options) {
    EXPECT_TRUE(is_ok(make_tiny(folder_.file(name), options)));
    return folder_.file(name);
  }
  CheckpointForm form(const std::string& path) {
    const Result<Checkpoint> checkpoint = Checkpoint::open(path);
    EXPECT_TRUE(is_ok(checkpoint.status()));
    Result<CheckpointForm> form = CheckpointForm::of(*checkpoint);
    EXPECT_TRUE(is_ok(form.status()));
    return *form;
  }
  static void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

  TempFolder folder_;
};

TEST_F(CheckpointForms, OtherValuesAndShardsAreTheSameForm) {
  MakeTinyOptions options = small_model("gpt-oss-tiny");
  const CheckpointForm loaded = form(make("a", options));
  options.seed = 5;
  options.num_shards = 3;
  EXPECT_TRUE(is_ok(loaded.open_same(make("b", options)).status()));
}

TEST_F(CheckpointForms, NameTheFirstDifference) {
  const MakeTinyOptions options = small_model("gpt-oss-tiny");
  const std::string a = make("a", options);
  const CheckpointForm loaded = form(a);
  MakeTinyOptions wide = options;
  wide.hidden_size = 128;
  EXPECT_TRUE(fails_with(loaded.open_same(make("wide", wide)), StatusCode::kInvalidArgument,
                         {"wide", "config.json: hidden_size is 128", "loaded model it is 96"}));
  CheckpointForm other = loaded;
  other.tensors.erase("model.norm.weight");
  EXPECT_TRUE(fails_with(loaded.check_same(other), StatusCode::kInvalidArgument,
                         {"has no tensor 'model.norm.weight', which is BF16 [96]"}));
  EXPECT_TRUE(fails_with(
      other.check_same(loaded), StatusCode::kInvalidArgument,
      {"'model.norm.weight' in 'model.safetensors' is BF16 [96]", "loaded model has no such tensor"}));
  other = loaded;
  other.tensors["model.norm.weight"].shape = {8, 12};
  EXPECT_TRUE(fails_with(loaded.check_same(other), StatusCode::kInvalidArgument,
                         {"'model.norm.weight'", "is BF16 [8, 12]", "it is BF16 [96]"}));
  other = loaded;
  other.tensors["model.norm.weight"].dtype = DType::kF32;
  EXPECT_TRUE(fails_with(loaded.check_same(other), StatusCode::kInvalidArgument,
                         {"'model.norm.weight'", "is F32 [96]", "it is BF16 [96]"}));
  EXPECT_TRUE(fails_with(loaded.open_same(folder_.file("none")), StatusCode::kNotFound, {"none"}));
}

// Values are compared whole, whatever their depth; how the files were made does not matter.
TEST_F(CheckpointForms, CompareAllSettings) {
  const std::string a = make("a", small_model("gpt-oss-tiny"));
  const std::string long_name(100, 'n');
  write(a + "/config.json", R"({"a": {"b": [1, {"c": 2.5}], "e": []}, "n": ")" + long_name +
                                R"(1", "transformers_version": "4"})");
  const CheckpointForm loaded = form(a);
  EXPECT_EQ(loaded.settings.size(), 4u);
  const auto compare = [&](const std::string& config) {
    write(a + "/config.json", config);
    return loaded.check_same(form(a));
  };
  EXPECT_TRUE(is_ok(compare(R"({"n": ")" + long_name +
                            R"(1", "_name_or_path": "x", "a": {"e": [], "b": [1, {"c": 2.5}]}})")));
  EXPECT_TRUE(fails_with(compare(R"({"a": {"b": [1, {"c": 3}], "e": []}, "n": ")" + long_name + R"(1"})"),
                         StatusCode::kInvalidArgument, {"config.json: a.b[1].c is 3", "it is 2.5"}));
  EXPECT_TRUE(fails_with(compare(R"({"a": {"b": [1, {"c": 2.5}], "e": []}, "n": ")" + long_name + R"(2"})"),
                         StatusCode::kInvalidArgument, {"config.json: n is"}));
  EXPECT_TRUE(fails_with(compare(R"({"a": {"b": [1, {"c": 2.5}]}, "n": ")" + long_name + R"(1"})"),
                         StatusCode::kInvalidArgument, {"config.json: a.e is missing", "it is []"}));
  write(a + "/hf_quant_config.json", R"({"quantization": {"group_size": 16}, "producer": {"version": 1}})");
  EXPECT_TRUE(fails_with(compare(R"({"a": {"b": [1, {"c": 2.5}], "e": []}, "n": ")" + long_name + R"(1"})"),
                         StatusCode::kInvalidArgument,
                         {"hf_quant_config.json: quantization.group_size is 16", "it is missing"}));
}

}  // namespace
}  // namespace fp4moe
