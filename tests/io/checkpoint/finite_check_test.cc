#include "io/checkpoint/finite_check.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "formats/bf16.h"
#include "io/status_matchers.h"

namespace fp4moe {
namespace {

constexpr int64_t kRows = 67, kCols = 1031;  // not multiples of the chunk or vector size

// A tensor [kRows, kCols] of finite values that use every exponent below infinity's.
template <class Int>
struct Tensor {
  explicit Tensor(DType dtype, Int magnitude_below_infinity) : values(kRows * kCols) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<Int>(
          static_cast<Int>(static_cast<int64_t>(i * 2654435761u) % magnitude_below_infinity) ^
          (i % 3 == 0 ? std::numeric_limits<Int>::min() : Int{0}));
    entry = {.name = "w",
             .view = {reinterpret_cast<const uint8_t*>(values.data()), dtype, {kRows, kCols}},
             .file = "model.safetensors"};
  }
  std::vector<Int> values;
  TensorEntry entry;
};

class FiniteCheck : public testing::Test {
 protected:
  // Puts `bad` at several places and checks the position in each message.
  template <class Int>
  void finds(Tensor<Int>& tensor, Int bad, const char* word) {
    ASSERT_TRUE(is_ok(check_finite({&tensor.entry}, pool_)));
    for (const int64_t at : {int64_t{0}, int64_t{1}, kCols - 1, kCols, 33 * kCols + 517, kRows * kCols - 1}) {
      const Int good = std::exchange(tensor.values[static_cast<size_t>(at)], bad);
      EXPECT_TRUE(fails_with(check_finite({&tensor.entry}, pool_), StatusCode::kDataLoss,
                             {"'w'", "'model.safetensors'", word,
                              "[" + std::to_string(at / kCols) + ", " + std::to_string(at % kCols) + "]"}));
      tensor.values[static_cast<size_t>(at)] = good;
    }
  }
  ThreadPool pool_{3};
};

TEST_F(FiniteCheck, FindsNanAndInfinityOfEveryType) {
  Tensor<uint16_t> bf16(DType::kBF16, 0x7F80), f16(DType::kF16, 0x7C00);
  Tensor<uint32_t> f32(DType::kF32, 0x7F800000);
  Tensor<uint8_t> e4m3(DType::kF8E4M3, 0x7F);
  for (const uint8_t nan : {0x7F, 0xFF}) finds<uint8_t>(e4m3, nan, "NaN");
  for (const uint16_t sign : {0, 0x8000}) {
    finds<uint16_t>(bf16, static_cast<uint16_t>(sign | 0x7F80), "infinite");
    finds<uint16_t>(bf16, static_cast<uint16_t>(sign | 0x7F81), "NaN");
    finds<uint16_t>(f16, static_cast<uint16_t>(sign | 0x7C00), "infinite");
    finds<uint16_t>(f16, static_cast<uint16_t>(sign | 0x7FFF), "NaN");
    finds<uint32_t>(f32, static_cast<uint32_t>(sign << 16 | 0x7F800000), "infinite");
    finds<uint32_t>(f32, static_cast<uint32_t>(sign << 16 | 0x7F800001), "NaN");
  }
}

TEST_F(FiniteCheck, NamesTheFirstOfSeveral) {
  Tensor<uint16_t> tensor(DType::kBF16, 0x7F80);
  for (size_t i = 40 * kCols + 3; i < tensor.values.size(); i += 7) tensor.values[i] = 0x7FC0;
  for (int run = 0; run < 20; ++run)
    EXPECT_TRUE(fails_with(check_finite({&tensor.entry}, pool_), StatusCode::kDataLoss, {"[40, 3]"}));
}

// A rank reads only its part of a tensor.
TEST_F(FiniteCheck, LooksAtThePartAlone) {
  Tensor<uint16_t> tensor(DType::kBF16, 0x7F80);
  tensor.values[20 * kCols + 300] = 0x7F80;
  const TensorEntry* w = &tensor.entry;
  for (const TensorPart& part :
       {TensorPart{w, 0, 20}, TensorPart{w, 21}, TensorPart{w, 0, -1, 0, 300}, TensorPart{w, 0, -1, 301},
        TensorPart{w, 20, 1, 301, 5}, TensorPart{w, 20, 0}})
    EXPECT_TRUE(is_ok(check_finite(part, pool_)));
  for (const TensorPart& part :
       {TensorPart{w, 20, 1}, TensorPart{w, 20}, TensorPart{w, 0, -1, 300, 1}, TensorPart{w, 19, 2, 299, 2}})
    EXPECT_TRUE(fails_with(check_finite(part, pool_), StatusCode::kDataLoss, {"[20, 300]"}));
}

TEST_F(FiniteCheck, PassesTypesWithoutNanAndEmptyTensors) {
  const std::vector<uint8_t> bytes(64, 0xFF);
  for (const DType dtype : {DType::kU8, DType::kI8, DType::kI32}) {
    const TensorEntry codes = {.name = "c", .view = {bytes.data(), dtype, {16}}, .file = "f"};
    EXPECT_TRUE(is_ok(check_finite({&codes}, pool_)));
  }
  const TensorEntry empty = {.name = "e", .view = {bytes.data(), DType::kBF16, {0, 4}}, .file = "f"};
  EXPECT_TRUE(is_ok(check_finite({&empty}, pool_)));
  const float nan = NAN;
  const TensorEntry scalar = {
      .name = "s", .view = {reinterpret_cast<const uint8_t*>(&nan), DType::kF32, {}}, .file = "f"};
  EXPECT_TRUE(fails_with(check_finite({&scalar}, pool_), StatusCode::kDataLoss, {"'s'", "NaN", "[]"}));
}

}  // namespace
}  // namespace fp4moe
