#include <cmath>

#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {

namespace {

double inverse_rms(const float* x, int64_t cols, float eps) {
  double sum = 0;
  for (int64_t i = 0; i < cols; ++i) sum += static_cast<double>(x[i]) * x[i];
  return 1 / std::sqrt(sum / static_cast<double>(cols) + eps);
}

}  // namespace

void rms_norm(const RmsNormArgs& a, ThreadPool& pool) {
  const int64_t cols = a.out_act.cols;
  pool.run(a.out_act.rows, [&](int64_t t, int) {
    const float* x = a.x + t * cols;
    const double inverse = inverse_rms(x, cols, a.eps);
    for (int64_t i = 0; i < cols; ++i) {
      const float y = static_cast<float>(x[i] * inverse * a.weight[i]);
      if (a.out_f32 != nullptr) a.out_f32[t * cols + i] = y;
      if (a.out_act.data != nullptr) store_elem(a.out_act.data, a.out_act.dtype, t * cols + i, y);
    }
  });
}

void head_norm(const HeadNormArgs& a, ThreadPool& pool) {
  pool.run(a.num_tokens * a.num_heads, [&](int64_t i, int) {
    float* x = a.x + i / a.num_heads * a.row_stride + i % a.num_heads * a.head_dim;
    const double inverse = inverse_rms(x, a.head_dim, a.eps);
    for (int d = 0; d < a.head_dim; ++d) x[d] = static_cast<float>(x[d] * inverse * a.weight[d]);
  });
}

}  // namespace fp4moe::ref
