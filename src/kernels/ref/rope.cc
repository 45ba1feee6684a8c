#include <cmath>

#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {

void rope(const RopeArgs& a, ThreadPool& pool) {
  const int half = a.rotary_dim / 2;
  pool.run(a.num_tokens, [&](int64_t t, int) {
    for (int i = 0; i < half; ++i) {
      // The angle is rounded to f32, as in the models' training code; the rest is in double.
      const float angle = static_cast<float>(a.positions[t]) * a.inv_freq[i];
      const double cosine = std::cos(static_cast<double>(angle)) * a.attention_factor;
      const double sine = std::sin(static_cast<double>(angle)) * a.attention_factor;
      for (int h = 0; h < a.num_heads; ++h) {
        float* head = a.x + t * a.row_stride + static_cast<int64_t>(h) * a.head_dim;
        const double first = head[i], second = head[i + half];
        head[i] = static_cast<float>(first * cosine - second * sine);
        head[i + half] = static_cast<float>(second * cosine + first * sine);
      }
    }
  });
}

}  // namespace fp4moe::ref
