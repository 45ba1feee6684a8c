// Computes  (x_i, x_j) <- (x_i cos - x_j sin, x_j cos + x_i sin), j = i + rotary_dim/2,
//           angle = position * inv_freq_i.
// Bytes     8 per element; the sines cost about 30 operations per pair of columns, once for all heads.
// Numerics  the angle is rounded to f32 (as the models were trained), then sine and cosine are computed in
//           double: r = argument - n pi/2 (|r| <= pi/4), Taylor series to r^11 and r^12, remainder < 7e-12.
//           Every ISA gives the same bits.
#include "kernels/cpu/dense_chunks.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

// Computes sine[i] and cosine[i] of angle[i] for all lanes in a plain loop, which the compiler vectorises.
inline void sin_cos(const float* angle, float* sine, float* cosine) {
  constexpr double kTwoOverPi = 0.63661977236758134308, kShift = 6755399441055744.0;  // 1.5 * 2^52
  constexpr double kHalfPiHigh = 1.57079632679489655800, kHalfPiLow = 6.12323399573676603587e-17;
  for (int i = 0; i < kLanes; ++i) {
    const double shifted = angle[i] * kTwoOverPi + kShift, n = shifted - kShift;
    const uint64_t quadrant = __builtin_bit_cast(uint64_t, shifted);
    const double r = (angle[i] - n * kHalfPiHigh) - n * kHalfPiLow, q = r * r;
    const double s =
        r * (1 + q * (-1.0 / 6 + q * (1.0 / 120 + q * (-1.0 / 5040 + q * (1.0 / 362880 - q / 39916800)))));
    const double c =
        1 + q * (-0.5 + q * (1.0 / 24 +
                             q * (-1.0 / 720 + q * (1.0 / 40320 + q * (-1.0 / 3628800 + q / 479001600)))));
    const bool swap = quadrant & 1;
    const double sine_magnitude = swap ? c : s, cosine_magnitude = swap ? s : c;
    sine[i] = static_cast<float>(quadrant & 2 ? -sine_magnitude : sine_magnitude);
    cosine[i] = static_cast<float>((quadrant + 1) & 2 ? -cosine_magnitude : cosine_magnitude);
  }
}

}  // namespace

void rope_chunk(const RopeArgs& a, int64_t row_begin, int64_t row_end) {
  const int half = a.rotary_dim / 2;
  for (int64_t t = row_begin; t < row_end; ++t) {
    for (int i = 0; i < half; i += kLanes) {
      const int n = half - i;
      alignas(64) float angle[kLanes], sine[kLanes], cosine[kLanes];
      store(angle, mul(broadcast(static_cast<float>(a.positions[t])), load_partial(a.inv_freq + i, n)));
      sin_cos(angle, sine, cosine);
      const Vec factor = broadcast(a.attention_factor);
      const Vec cos = mul(load(cosine), factor), sin = mul(load(sine), factor);
      for (int h = 0; h < a.num_heads; ++h) {
        float* first = a.x + t * a.row_stride + static_cast<int64_t>(h) * a.head_dim + i;
        float* second = first + half;
        const Vec x = load_partial(first, n), y = load_partial(second, n);
        store_partial(first, sub(mul(x, cos), mul(y, sin)), n);
        store_partial(second, add(mul(y, cos), mul(x, sin)), n);
      }
    }
  }
}

}  // namespace fp4moe::FP4MOE_ISA
