// Finds NaN and infinite weights before they are used: one such value makes every logit NaN.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

// A rectangular part of a tensor: a range of rows (a row spans the last dimension) and of columns.
struct TensorPart {
  const TensorEntry* tensor = nullptr;
  int64_t first_row = 0, num_rows = -1;  // -1: all remaining
  int64_t first_col = 0, num_cols = -1;
};

// kDataLoss, naming the tensor, the first bad element's indices and its kind, if an element of the part is
// NaN or infinite. Checks bf16, f16, f32 and e4m3; other types pass. Reads the part once, in parallel.
Status check_finite(const TensorPart& part, ThreadPool& pool);

}  // namespace fp4moe
