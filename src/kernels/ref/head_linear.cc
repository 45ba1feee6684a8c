#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {

void head_linear(const HeadLinearArgs& a, ThreadPool& pool) {
  pool.run(a.num_tokens * a.num_heads, [&](int64_t i, int) {
    const int64_t t = i / a.num_heads, head = i % a.num_heads;
    const float* x = a.x + t * a.x_stride + head * a.x_head_stride;
    const int64_t out = t * a.out_stride + head * a.out_head_stride;
    for (int64_t n = 0; n < a.n; ++n) {
      const bf16* w = a.weight + (head * a.n + n) * a.k;
      double sum = 0;
      for (int64_t k = 0; k < a.k; ++k) sum += static_cast<double>(x[k]) * bf16_to_float(w[k]);
      store_elem(a.out, a.out_dtype, out + n, static_cast<float>(sum * a.scale));
    }
  });
}

}  // namespace fp4moe::ref
