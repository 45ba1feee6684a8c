#include "base/tensor_view.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

TEST(TensorView, CountsElementsAndBytes) {
  EXPECT_EQ((TensorView{nullptr, DType::kBF16, {3, 5}}).num_bytes(), 30);
  EXPECT_EQ((TensorView{nullptr, DType::kF32, {}}).num_bytes(), 4);
  EXPECT_EQ((TensorView{nullptr, DType::kF32, {7, 0}}).num_bytes(), 0);
  EXPECT_EQ((TensorView{nullptr, DType::kF4, {3, 3}}).num_bytes(), 5);  // nine nibbles
}

TEST(TensorView, ShapesPrint) {
  EXPECT_EQ(shape_string({}), "[]");
  const int64_t shape[] = {16, 512, 8};
  EXPECT_EQ(shape_string(shape), "[16, 512, 8]");
}

}  // namespace
}  // namespace fp4moe
