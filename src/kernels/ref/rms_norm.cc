#include <cmath>

#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {

void rms_norm(const RmsNormArgs& a, ThreadPool& pool) {
  const int64_t cols = a.out_act.cols;
  pool.run(a.out_act.rows, [&](int64_t t, int) {
    const float* x = a.x + t * cols;
    double sum = 0;
    for (int64_t i = 0; i < cols; ++i) sum += static_cast<double>(x[i]) * x[i];
    const double inverse = 1 / std::sqrt(sum / static_cast<double>(cols) + a.eps);
    for (int64_t i = 0; i < cols; ++i) {
      const float y = static_cast<float>(x[i] * inverse * a.weight[i]);
      if (a.out_f32 != nullptr) a.out_f32[t * cols + i] = y;
      if (a.out_act.data != nullptr) store_elem(a.out_act.data, a.out_act.dtype, t * cols + i, y);
    }
  });
}

}  // namespace fp4moe::ref
