#include "base/dtype.h"

#include <string>

namespace fp4moe {
namespace {

struct DTypeRow {
  DType dtype;
  int bits;
  const char* name;
};

constexpr DTypeRow kDTypes[] = {
    {DType::kBool, 8, "BOOL"},      {DType::kU8, 8, "U8"},          {DType::kI8, 8, "I8"},
    {DType::kU16, 16, "U16"},       {DType::kI16, 16, "I16"},       {DType::kF16, 16, "F16"},
    {DType::kBF16, 16, "BF16"},     {DType::kU32, 32, "U32"},       {DType::kI32, 32, "I32"},
    {DType::kF32, 32, "F32"},       {DType::kU64, 64, "U64"},       {DType::kI64, 64, "I64"},
    {DType::kF64, 64, "F64"},       {DType::kF8E4M3, 8, "F8_E4M3"}, {DType::kF8E5M2, 8, "F8_E5M2"},
    {DType::kF8E8M0, 8, "F8_E8M0"}, {DType::kF4, 4, "F4"},
};

}  // namespace

int dtype_bits(DType dtype) { return kDTypes[static_cast<int>(dtype)].bits; }

const char* dtype_name(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }

Result<DType> parse_dtype(std::string_view name) {
  for (const DTypeRow& row : kDTypes)
    if (name == row.name) return row.dtype;
  return invalid_argument("unknown dtype '" + std::string(name) + "'");
}

}  // namespace fp4moe
