#include <cmath>

#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {

void silu_mul(const SiluMulArgs& a, ThreadPool& pool) {
  const int64_t cols = a.out.cols;
  pool.run(a.out.rows, [&](int64_t t, int) {
    const float* gate = a.gate_up + 2 * t * cols;
    const float* up = gate + cols;
    for (int64_t i = 0; i < cols; ++i) {
      const double y = gate[i] / (1 + std::exp(-static_cast<double>(gate[i]))) * up[i];
      store_elem(a.out.data, a.out.dtype, t * cols + i, static_cast<float>(y));
    }
  });
}

}  // namespace fp4moe::ref
