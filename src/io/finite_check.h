// Weights that are NaN or infinite, found before they are used: one such value makes every logit NaN.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "io/checkpoint.h"

namespace fp4moe {

// A part of a tensor whose last dimension is a row: a range of rows, of each a range of columns.
struct TensorPart {
  const TensorEntry* tensor = nullptr;
  int64_t first_row = 0, num_rows = -1;  // -1: all that follow
  int64_t first_col = 0, num_cols = -1;
};

// kDataLoss, naming the tensor, the first bad element's indices and whether it is NaN or infinite, if an
// element of the part is either. bf16, f16 and f32; other types pass. Reads the part once, in parallel.
Status check_finite(const TensorPart& part, ThreadPool& pool);

}  // namespace fp4moe
