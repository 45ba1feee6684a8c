#include <algorithm>

#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

constexpr int64_t kOutputsPerChunk = 16;
constexpr int kLanes = 8;  // partial sums, so that the compiler may keep them in vector registers

template <class X>
double dot(const X* x, const bf16* w, int64_t k) {
  auto x_at = [&](int64_t i) -> double {
    if constexpr (std::is_same_v<X, float>)
      return x[i];
    else
      return bf16_to_float(x[i]);
  };
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += x_at(i + lane) * static_cast<double>(bf16_to_float(w[i + lane]));
  double sum = 0;
  for (; i < k; ++i) sum += x_at(i) * static_cast<double>(bf16_to_float(w[i]));
  for (double s : sums) sum += s;
  return sum;
}

template <class X>
void linear_outputs(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < a.x.rows; ++t) {
    for (int64_t n = begin; n < end; ++n) {
      const X* x = static_cast<const X*>(a.x.data) + t * a.x.cols;
      double sum = dot(x, a.weight + n * a.x.cols, a.x.cols);
      float& out = a.out[t * a.n + n];
      if (a.bias != nullptr) sum += a.bias[n];
      if (a.accumulate) sum += out;
      out = static_cast<float>(sum);
    }
  }
}

}  // namespace

void linear(const LinearArgs& a, ThreadPool& pool) {
  pool.run((a.n + kOutputsPerChunk - 1) / kOutputsPerChunk, [&](int64_t chunk, int) {
    const int64_t begin = chunk * kOutputsPerChunk, end = std::min(a.n, begin + kOutputsPerChunk);
    if (a.x.dtype == DType::kF32)
      linear_outputs<float>(a, begin, end);
    else
      linear_outputs<bf16>(a, begin, end);
  });
}

}  // namespace fp4moe::ref
