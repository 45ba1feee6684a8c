// Views of memory that somebody else owns.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace fp4moe {

// A type-erased, contiguous, row-major tensor; read-only. Used for storage (checkpoints); compute
// takes typed pointers with their shapes in the argument structs of kernels/ops.h.
struct TensorView {
  const uint8_t* data = nullptr;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;

  int64_t num_elems() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  int64_t num_bytes() const { return (num_elems() * dtype_bits(dtype) + 7) / 8; }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
};

// "[16, 512, 8, 16]".
std::string shape_string(std::span<const int64_t> shape);

}  // namespace fp4moe
