// A part of the weights, as bytes.
#pragma once

#include <cstdint>

namespace fp4moe {

// 16-byte aligned; in the memory of the ops that read it.
struct WeightBytes {
  const void* data = nullptr;  // null: none
  int64_t num_bytes = 0;
};

}  // namespace fp4moe
