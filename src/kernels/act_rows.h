// Rows of activations: the inputs and outputs of GEMMs.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace fp4moe {

// Rows of a matrix of either activation type; data may be null if rows == 0.
struct ActRows {
  void* data = nullptr;        // [rows, cols] of dtype
  DType dtype = DType::kBF16;  // kBF16 or kF32
  int64_t rows = 0, cols = 0;
};

}  // namespace fp4moe
