// Loading refuses bad weights in each family and dialect: every tensor is required, and every value must be
// finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "io/changed_checkpoint.h"
#include "io/checkpoint/mtp_layers.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/config/tensor_names.h"
#include "io/small_model.h"
#include "io/small_shapes.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "io/write/dummy_checkpoint.h"
#include "model/model.h"
#include "model/plan_model.h"
#include "reference_prompt.h"

namespace fp4moe {
namespace {

// Loads a model on one CPU rank.
class Loader {
 public:
  explicit Loader(ModelConfig config) : config_(std::move(config)) {
    EngineConfig flags;
    flags.fp4_compute = "w4a16";
    auto plan = plan_model(config_, flags);
    EXPECT_TRUE(is_ok(plan));
    if (plan.ok()) plan_ = std::move(*plan);
  }
  Status load(const Checkpoint& checkpoint) {
    const ModelOptions options{
        .act_dtype = plan_.act_dtype, .isa = plan_.isa, .moe_plan = plan_.moe, .max_batch_tokens = 4};
    return Model::load(checkpoint, config_, options, pool_, {}).status();
  }
  const ModelConfig& config() const { return config_; }

 private:
  ModelConfig config_;
  ModelPlan plan_;
  ThreadPool pool_{1};
};

std::vector<std::string> published() {
  std::vector<std::string> folders = {FP4MOE_MODELS "/demo-gptoss-mxfp4", FP4MOE_MODELS "/demo-dsv3-nvfp4"};
  for (const auto& entry : std::filesystem::directory_iterator(FP4MOE_FIXTURES))
    folders.push_back(entry.path().string());
  return folders;
}

TEST(WeightChecks, AllTensorsOfDemosAndFixturesAreUsed) {
  for (const std::string& folder : published()) {
    SCOPED_TRACE(folder);
    const auto config = load_model_config(folder);
    const auto checkpoint = Checkpoint::open(folder);
    ASSERT_TRUE(is_ok(config) && is_ok(checkpoint));
    const UnusedTensors unused = find_unused_tensors(*checkpoint, *config);
    EXPECT_TRUE(unused.in_model.empty() && unused.elsewhere.empty());
  }
}

// The tensors of a small model; a shape without a dialect is a fixture.
class EveryTensor : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    std::string folder = std::string(FP4MOE_FIXTURES "/") + GetParam().like;
    if (GetParam().dialect[0] != '\0') {
      MakeTinyOptions options = small_model(GetParam().like);
      options.dialect = GetParam().dialect;
      folder = folder_.file("m");
      ASSERT_TRUE(is_ok(make_tiny(folder, options)));
    }
    auto config = load_model_config(folder);
    auto checkpoint = Checkpoint::open(folder);
    ASSERT_TRUE(is_ok(config) && is_ok(checkpoint));
    loader_.emplace(std::move(*config));
    source_.emplace(std::move(*checkpoint));
    ASSERT_TRUE(is_ok(loader_->load(*source_)));
  }
  bool is_not_used(const std::string& name) const {
    return is_vision_name(name) || is_mtp_tensor(loader_->config(), *source_, name);
  }
  TempFolder folder_;
  std::optional<Loader> loader_;
  std::optional<Checkpoint> source_;
};

// Loading fails if any used tensor is missing, except for optional input scales.
TEST_P(EveryTensor, IsNeeded) {
  for (const TensorEntry& tensor : source_->tensors()) {
    if (is_not_used(tensor.name)) continue;
    ChangedCheckpoint changed(*source_);
    changed.remove(tensor.name);
    const Status status = loader_->load(changed.make());
    const bool is_optional =
        tensor.name.ends_with(".input_scale") || tensor.name.ends_with(".input_global_scale");
    EXPECT_EQ(status.ok(), is_optional) << tensor.name << ": " << status.to_string();
  }
}

// Tests an element in the middle, at the start or at the end.
TEST_P(EveryTensor, IsRefusedByNameWhereItIsNotFinite) {
  int64_t turn = 0;
  for (const TensorEntry& tensor : source_->tensors()) {
    if (is_not_used(tensor.name)) continue;
    const bool is_scale = tensor.name.ends_with("scale") || tensor.name.ends_with("_scales");
    const DType dtype = tensor.view.dtype;
    const bool is_e8m0 = dtype == DType::kF8E8M0 || (dtype == DType::kU8 && is_scale);
    if ((dtype == DType::kU8 || dtype == DType::kI8) && !is_e8m0) continue;  // codes: all are finite
    // The input scale of an FP8 layer is not used.
    const std::string module = tensor.name.substr(0, tensor.name.rfind('.'));
    if (const TensorEntry* codes = source_->find(module + ".weight");
        tensor.name.ends_with(".input_scale") && codes != nullptr && codes->view.dtype == DType::kF8E4M3)
      continue;
    ChangedCheckpoint changed(*source_);
    const int64_t n = tensor.view.num_elems(), at = std::vector<int64_t>{0, n / 2, n - 1}[++turn % 3];
    uint8_t* bytes = changed.writable(tensor.name);
    const bool infinite = turn % 2 == 0;
    if (dtype == DType::kBF16)
      reinterpret_cast<uint16_t*>(bytes)[at] = infinite ? 0xFF80 : 0x7FC1;
    else if (dtype == DType::kF32)
      reinterpret_cast<uint32_t*>(bytes)[at] = infinite ? 0x7F800000u : 0xFFC00000u;
    else
      bytes[at] = is_e8m0 ? 0xFF : 0x7F;
    EXPECT_TRUE(fails_with(loader_->load(changed.make()), StatusCode::kDataLoss, {"'" + tensor.name + "'"}))
        << "element " << at << " of " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryTensor, all_shapes(), shape_name);
INSTANTIATE_TEST_SUITE_P(Fp8, EveryTensor,
                         testing::Values(Shape{"dsv3_h160_fp8_blocks", ""}, Shape{"dsv3_h64_quark", ""},
                                         Shape{"qwen3_h64_modelopt_mixed", ""},
                                         Shape{"qwen3_h64_compressed_mixed", ""},
                                         Shape{"qwen3_5_h32_modelopt_mixed", ""}),
                         shape_name);
INSTANTIATE_TEST_SUITE_P(Fused, EveryTensor, testing::Values(Shape{"qwen3_vl_h32_bf16_fused", ""}),
                         shape_name);

std::string file_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The fixture with other rope_parameters, or without any.
class GptOssRope : public testing::Test {
 protected:
  std::vector<float> logits(const std::string& rope_parameters) {
    namespace fs = std::filesystem;
    const std::string source = FP4MOE_FIXTURES "/h192_i96_yarn";
    const TempFolder folder;
    fs::create_symlink(source + "/model.safetensors", folder.file("model.safetensors"));
    std::string config = file_text(source + "/config.json");
    const size_t begin = config.find("\"rope_parameters\""), end = config.find('}', begin);
    config.replace(begin, config.find(',', end) + 1 - begin, rope_parameters);
    std::ofstream(folder.file("config.json")) << config;
    EngineConfig flags;
    flags.dtype = "float32";
    flags.moe_runner_backend = "ref";
    std::vector<int32_t> ids(40);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 37 % 97);
    const auto result = compute_logits({folder.path(), flags}, ids);
    EXPECT_TRUE(is_ok(result));
    return result.ok() ? *result : std::vector<float>{};
  }
};

TEST_F(GptOssRope, ConfigurationsWithoutItMeanTheStockClassesYarn) {
  const std::vector<float> missing = logits("");
  EXPECT_EQ(missing,
            logits(R"("rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
      "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096},)"));
  EXPECT_NE(missing, logits(R"("rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},)"));
}

}  // namespace
}  // namespace fp4moe
