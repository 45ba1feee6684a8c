#include "io/checkpoint/finite_check.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/run_ranges.h"

namespace fp4moe {
namespace {

constexpr int64_t kElementsPerChunk = int64_t{1} << 16;

// Returns the index of the first of n elements whose exponent bits are all ones, or -1. The first loop has no
// early exit, so that it is vectorised; elements are signed because SSE2 has only a signed 16-bit maximum.
template <class Int>
int64_t find_not_finite(const Int* x, int64_t n, Int magnitude, Int infinity) {
  Int largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max<Int>(largest, static_cast<Int>(x[i] & magnitude));
  if (largest < infinity) return -1;
  return std::find_if(x, x + n, [&](Int v) { return static_cast<Int>(v & magnitude) >= infinity; }) - x;
}

int64_t find_not_finite(const TensorView& view, int64_t first, int64_t n) {
  switch (view.dtype) {
    case DType::kBF16:
      return find_not_finite<int16_t>(view.as<int16_t>() + first, n, 0x7FFF, 0x7F80);
    case DType::kF16:
      return find_not_finite<int16_t>(view.as<int16_t>() + first, n, 0x7FFF, 0x7C00);
    case DType::kF32:
      return find_not_finite<int32_t>(view.as<int32_t>() + first, n, 0x7FFFFFFF, 0x7F800000);
    case DType::kF8E4M3:  // no infinity: only codes 0x7F and 0xFF are NaN
      return find_not_finite<int8_t>(view.as<int8_t>() + first, n, 0x7F, 0x7F);
    default:
      return -1;
  }
}

bool has_not_finite(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32 || dtype == DType::kF8E4M3;
}

// Whether the element, which is not finite, is an infinity (its fraction is 0) and not a NaN.
bool is_infinite(const TensorView& view, int64_t at) {
  if (view.dtype == DType::kF8E4M3) return false;
  if (view.dtype == DType::kF32) return std::isinf(view.as<float>()[at]);
  return (view.as<int16_t>()[at] & (view.dtype == DType::kBF16 ? 0x7F : 0x3FF)) == 0;
}

Status not_finite(const TensorEntry& tensor, int64_t at) {
  std::string indices;
  int64_t rest = at;
  for (size_t i = tensor.view.shape.size(); i-- > 0; rest /= tensor.view.shape[i])
    indices = std::to_string(rest % tensor.view.shape[i]) + (indices.empty() ? "" : ", ") + indices;
  return data_loss("tensor '" + tensor.name + "' in '" + tensor.file + "' is " +
                   (is_infinite(tensor.view, at) ? "infinite" : "NaN") + " at [" + indices +
                   "]; legal: finite numbers");
}

}  // namespace

Status check_finite(const TensorPart& part, ThreadPool& pool) {
  const TensorView& view = part.tensor->view;
  const int64_t total = view.num_elems();
  if (!has_not_finite(view.dtype) || total == 0) return {};
  const int64_t row = view.shape.empty() ? 1 : view.shape.back(), all_rows = total / row;
  const int64_t num_rows = part.num_rows < 0 ? all_rows - part.first_row : part.num_rows;
  const int64_t num_cols = part.num_cols < 0 ? row - part.first_col : part.num_cols;
  FP4MOE_CHECK(part.first_row >= 0 && num_rows >= 0 && part.first_row + num_rows <= all_rows &&
                   part.first_col >= 0 && num_cols >= 0 && part.first_col + num_cols <= row,
               "a part outside of tensor '" + part.tensor->name + "'");
  const int64_t step = std::max<int64_t>(1, kElementsPerChunk / row);
  const int64_t first_bad = find_lowest(&pool, num_rows, step, [&](int64_t from, int64_t to) -> int64_t {
    for (int64_t r = part.first_row + from; r < part.first_row + to; ++r) {
      const int64_t begin = r * row + part.first_col, found = find_not_finite(view, begin, num_cols);
      if (found >= 0) return begin + found;
    }
    return -1;
  });
  return first_bad < 0 ? Status() : not_finite(*part.tensor, first_bad);
}

}  // namespace fp4moe
