// Element types of tensors, named as in safetensors.
#pragma once

#include <cstdint>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kF8E4M3,  // OCP e4m3fn, max 448
  kF8E5M2,
  kF8E8M0,  // OCP e8m0fnu, 2^(byte - 127)
  kF4,      // e2m1, two elements per byte, the even one in the low nibble
};

// Bits of one element: 4 for kF4, else a multiple of 8.
int dtype_bits(DType dtype);
// The safetensors name, such as "BF16" or "F8_E4M3".
const char* dtype_name(DType dtype);
// The inverse of dtype_name(); kInvalidArgument for an unknown name.
Result<DType> parse_dtype(std::string_view name);

}  // namespace fp4moe
