// Computes  y = (x * 1/sqrt(mean(x^2) + eps)) * weight, row by row, or head by head in place.
// Bytes     4 H read, 2 or 4 H written per row; bound by the L2 cache or by memory.
// Numerics  the squares are summed in f32 in sixteen lanes (lane i takes columns i mod 16), then in a fixed
//           tree; relative error of the mean <= (H/16 + 5) eps.
#include "kernels/cpu/dense_chunks.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

inline float mean_square(const float* x, int64_t cols) {
  Vec squares = zero();
  for (int64_t i = 0; i < cols; i += kLanes) {
    const Vec v = load_partial(x + i, cols - i);
    squares = fma(v, v, squares);
  }
  return sum(squares) / static_cast<float>(cols);
}

}  // namespace

void rms_norm_chunk(const RmsNormArgs& a, int64_t row_begin, int64_t row_end) {
  const int64_t cols = a.out_act.cols;
  for (int64_t t = row_begin; t < row_end; ++t) {
    const float* x = a.x + t * cols;
    const Vec inverse = broadcast(1 / __builtin_sqrtf(mean_square(x, cols) + a.eps));
    for (int64_t i = 0; i < cols; i += kLanes) {
      const int64_t n = cols - i;
      const Vec y = mul(mul(load_partial(x + i, n), inverse), load_partial(a.weight + i, n));
      if (a.out_f32 != nullptr) store_partial(a.out_f32 + t * cols + i, y, n);
      if (a.out_act.data == nullptr) continue;
      if (a.out_act.dtype == DType::kF32)
        store_partial(static_cast<float*>(a.out_act.data) + t * cols + i, y, n);
      else
        store_partial(static_cast<bf16*>(a.out_act.data) + t * cols + i, y, n);
    }
  }
}

void head_norm_chunk(const HeadNormArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t i = row_begin * a.num_heads; i < row_end * a.num_heads; ++i) {
    float* x = a.x + i / a.num_heads * a.row_stride + i % a.num_heads * a.head_dim;
    const Vec inverse = broadcast(1 / __builtin_sqrtf(mean_square(x, a.head_dim) + a.eps));
    for (int d = 0; d < a.head_dim; d += kLanes) {
      const int n = a.head_dim - d;
      store_partial(x + d, mul(mul(load_partial(x + d, n), inverse), load_partial(a.weight + d, n)), n);
    }
  }
}

}  // namespace fp4moe::FP4MOE_ISA
