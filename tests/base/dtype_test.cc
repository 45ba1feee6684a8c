#include "base/dtype.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

TEST(DType, EveryTypeHasItsNameAndSize) {
  const struct {
    DType dtype;
    const char* name;
    int bits;
  } rows[] = {{DType::kBool, "BOOL", 8},      {DType::kU8, "U8", 8},          {DType::kI8, "I8", 8},
              {DType::kU16, "U16", 16},       {DType::kI16, "I16", 16},       {DType::kF16, "F16", 16},
              {DType::kBF16, "BF16", 16},     {DType::kU32, "U32", 32},       {DType::kI32, "I32", 32},
              {DType::kF32, "F32", 32},       {DType::kU64, "U64", 64},       {DType::kI64, "I64", 64},
              {DType::kF64, "F64", 64},       {DType::kF8E4M3, "F8_E4M3", 8}, {DType::kF8E5M2, "F8_E5M2", 8},
              {DType::kF8E8M0, "F8_E8M0", 8}, {DType::kF4, "F4", 4}};
  EXPECT_EQ(std::size(rows), static_cast<size_t>(DType::kF4) + 1);
  for (const auto& row : rows) {
    EXPECT_STREQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_bits(row.dtype), row.bits) << row.name;
    EXPECT_EQ(*parse_dtype(row.name), row.dtype);
  }
}

TEST(DType, RefusesOtherNames) {
  for (const char* name : {"", "bf16", "BF16 ", "F8", "E4M3"})
    EXPECT_EQ(parse_dtype(name).status().code(), StatusCode::kInvalidArgument) << name;
}

}  // namespace
}  // namespace fp4moe
