#include "io/checkpoint/kv_scales.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "formats/bf16.h"
#include "io/changed_checkpoint.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

const std::string kPrefix = "model.layers.3.self_attn.";

struct Scale {
  std::string name;  // after kPrefix
  float value;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape = {1};
};

Result<KvScales> load(const std::vector<Scale>& scales) {
  const Checkpoint empty = Checkpoint::in_memory("model", {}, nullptr);
  ChangedCheckpoint changed(empty);
  for (const Scale& scale : scales) {
    changed.add(kPrefix + scale.name, scale.dtype, scale.shape);
    uint8_t* bytes = changed.writable(kPrefix + scale.name);
    const bf16 rounded = float_to_bf16(scale.value);
    if (scale.dtype == DType::kBF16)
      std::memcpy(bytes, &rounded, sizeof rounded);
    else
      std::memcpy(bytes, &scale.value, sizeof scale.value);
  }
  return load_kv_scales(changed.make(), kPrefix);
}

TEST(KvScales, AreOneByDefault) {
  const Result<KvScales> scales = load({});
  ASSERT_TRUE(is_ok(scales));
  EXPECT_EQ(scales->k, 1);
  EXPECT_EQ(scales->v, 1);
}

TEST(KvScales, EveryNameAndTypeIsRead) {
  for (const auto& [k, v] : {std::pair{"k_scale", "v_scale"},
                             {"k_proj.k_scale", "v_proj.v_scale"},
                             {"attn.k_scale", "attn.v_scale"}})
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
        const Result<KvScales> scales = load({{k, 0.25f, dtype, shape}, {v, 3.0f, dtype, shape}});
        ASSERT_TRUE(is_ok(scales)) << k;
        EXPECT_EQ(scales->k, 0.25f) << k;
        EXPECT_EQ(scales->v, 3.0f) << v;
        EXPECT_TRUE(is_kv_scale(kPrefix + k) && is_kv_scale(kPrefix + v));
      }
}

TEST(KvScales, OneScaleIsForBoth) {
  for (const char* name : {"k_scale", "v_scale", "kv_scale"}) {
    const Result<KvScales> scales = load({{name, 0.5f}});
    ASSERT_TRUE(is_ok(scales)) << name;
    EXPECT_EQ(scales->k, 0.5f) << name;
    EXPECT_EQ(scales->v, 0.5f) << name;
  }
}

TEST(KvScales, BadValuesAndShapesAreRefusedByName) {
  for (const float bad : {0.0f, -1.0f, NAN, std::numeric_limits<float>::infinity(), 1e-40f})
    EXPECT_TRUE(
        fails_with(load({{"k_scale", bad}, {"v_scale", 1}}), StatusCode::kDataLoss, {kPrefix + "k_scale"}))
        << bad;
  EXPECT_TRUE(fails_with(load({{"v_proj.v_scale", 1, DType::kF32, {4}}}), StatusCode::kInvalidArgument,
                         {kPrefix + "v_proj.v_scale", "[4]"}));
}

TEST(KvScales, OtherTensorsAreNotScales) {
  for (const char* name : {"k_proj.weight", "k_proj.v_scale", "scale", "k_scale.weight"})
    EXPECT_FALSE(is_kv_scale(kPrefix + name)) << name;
  EXPECT_FALSE(is_kv_scale("model.layers.3.mlp.k_scale"));
  EXPECT_TRUE(is_kv_scale(kPrefix + "q_scale"));
}

}  // namespace
}  // namespace fp4moe
