// bf16 experts of families without biases whose projections are each one tensor.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/changed_checkpoint.h"
#include "io/checkpoint/expert_weights.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 3;
const std::string kGateUp = "model.layers.0.mlp.experts.gate_up_proj";
const std::string kDown = "model.layers.0.mlp.experts.down_proj";

ModelConfig config_of(int64_t hidden, int64_t intermediate) {
  ModelConfig config;
  config.family = ModelFamily::kQwen3Moe;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.num_experts = kExperts;
  config.num_layers = 1;
  config.quant.method = QuantMethod::kNone;
  return config;
}

struct Stored {
  const std::string name;
  DType dtype;
  std::vector<int64_t> shape;
};

// Loads the experts from tensors in which element i is the 16-bit number i.
class FusedBf16Experts : public testing::Test {
 protected:
  Result<MoeWeightsView> load(const std::vector<Stored>& tensors, const ModelConfig& config) {
    const Checkpoint empty = Checkpoint::in_memory("m", {}, nullptr);
    ChangedCheckpoint changed(empty);
    for (const Stored& tensor : tensors) {
      changed.add(tensor.name, tensor.dtype, tensor.shape);
      uint8_t* bytes = changed.writable(tensor.name);
      const TensorView view{nullptr, tensor.dtype, tensor.shape};
      for (int64_t i = 0; i < view.num_bytes() / 2; ++i) {
        const auto value = static_cast<uint16_t>(i);
        std::memcpy(bytes + 2 * i, &value, 2);
      }
    }
    checkpoint_ = std::make_unique<Checkpoint>(changed.make());
    return load_expert_weights(*checkpoint_, config, 0);
  }
  static int64_t at(const Bf16MatrixView& m, int64_t row, int64_t col) {
    uint16_t value;
    std::memcpy(&value, m.data + row * m.row_stride + col * m.col_stride, 2);
    return value;
  }

 private:
  std::unique_ptr<Checkpoint> checkpoint_;
};

// Includes H = 2 I and H = I, where one of the two tensors has the same shape in both orders.
TEST_F(FusedBf16Experts, EveryElementIsFoundInBothOrders) {
  constexpr DType kBF16 = DType::kBF16;
  for (const auto& [h, i] : {std::pair<int64_t, int64_t>{12, 5}, {10, 5}, {6, 6}, {4, 9}})
    for (const bool published : {true, false}) {
      const auto moe = published
                           ? load({{kGateUp, kBF16, {kExperts, h, 2 * i}}, {kDown, kBF16, {kExperts, i, h}}},
                                  config_of(h, i))
                           : load({{kGateUp, kBF16, {kExperts, 2 * i, h}}, {kDown, kBF16, {kExperts, h, i}}},
                                  config_of(h, i));
      ASSERT_TRUE(is_ok(moe));
      ASSERT_EQ(std::ssize(moe->bf16_experts), kExperts);
      for (int64_t e = 0; e < kExperts; ++e) {
        const Bf16ExpertView& w = moe->bf16_experts[static_cast<size_t>(e)];
        EXPECT_TRUE(w.gate_bias == nullptr && w.up_bias == nullptr && w.down_bias == nullptr);
        for (int64_t r = 0; r < i; ++r)
          for (int64_t c = 0; c < h; ++c) {
            const int64_t column = (e * h + c) * 2 * i, row = e * 2 * i;
            ASSERT_EQ(at(w.gate, r, c), published ? column + r : (row + r) * h + c);
            ASSERT_EQ(at(w.up, r, c), published ? column + i + r : (row + i + r) * h + c);
            ASSERT_EQ(at(w.down, c, r), published ? (e * i + r) * h + c : (e * h + c) * i + r);
          }
      }
    }
}

TEST_F(FusedBf16Experts, OtherShapesAreRefusedWithThoseFoundAndThoseNeeded) {
  struct Case {
    std::vector<int64_t> gate_up, down;
    std::string found;
    DType down_dtype = DType::kBF16;
  };
  for (const Case& c :
       {Case{{3, 12, 10}, {3, 12, 5}, "BF16 [3, 12, 10] and BF16 [3, 12, 5]"},  // one order each
        Case{{3, 10, 12}, {3, 5, 12}, "BF16 [3, 10, 12] and BF16 [3, 5, 12]"},
        Case{{4, 12, 10}, {4, 5, 12}, "BF16 [4, 12, 10] and BF16 [4, 5, 12]"},
        Case{{36, 10}, {15, 12}, "BF16 [36, 10] and BF16 [15, 12]"},
        Case{{3, 12, 5}, {3, 5, 12}, "BF16 [3, 12, 5] and BF16 [3, 5, 12]"},
        Case{{3, 12, 10}, {3, 5, 12}, "BF16 [3, 12, 10] and F32 [3, 5, 12]", DType::kF32}})
    EXPECT_TRUE(fails_with(
        load({{kGateUp, DType::kBF16, c.gate_up}, {kDown, c.down_dtype, c.down}}, config_of(12, 5)),
        StatusCode::kInvalidArgument,
        {"'" + kGateUp + "' and '" + kDown + "' are " + c.found,
         "the model needs BF16 [3, 12, 10] and BF16 [3, 5, 12], or BF16 [3, 10, 12] and BF16 [3, 12, 5]"}));
}

TEST_F(FusedBf16Experts, AMissingProjectionIsNamed) {
  const Stored gate_up{kGateUp, DType::kBF16, {3, 12, 10}}, down{kDown, DType::kBF16, {3, 5, 12}};
  EXPECT_TRUE(
      fails_with(load({gate_up}, config_of(12, 5)), StatusCode::kNotFound, {"no tensor '" + kDown + "'"}));
  EXPECT_TRUE(
      fails_with(load({down}, config_of(12, 5)), StatusCode::kNotFound, {"no tensor '" + kGateUp + "'"}));
}

}  // namespace
}  // namespace fp4moe
