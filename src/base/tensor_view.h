// Non-owning tensor views.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace fp4moe {

// A type-erased, contiguous, row-major, read-only tensor. Used for storage (checkpoints); kernels take typed
// pointers and shapes in argument structs (kernels/ops.h).
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

// Formats a shape, for example as "[16, 512, 8, 16]".
std::string shape_string(std::span<const int64_t> shape);

}  // namespace fp4moe
