#include <algorithm>

#include "formats/e4m3.h"
#include "formats/q8.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

constexpr int64_t kOutputsPerChunk = 16;
constexpr int kLanes = 8;  // partial sums, so that the compiler can keep them in vector registers

double to_double(float x) { return x; }
double to_double(bf16 x) { return bf16_to_float(x); }

template <class X>
double dot(const X* x, const bf16* w, int64_t k) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane] += to_double(x[i + lane]) * static_cast<double>(bf16_to_float(w[i + lane]));
  double sum = 0;
  for (; i < k; ++i) sum += to_double(x[i]) * static_cast<double>(bf16_to_float(w[i]));
  for (double s : sums) sum += s;
  return sum;
}

template <class X>
double dot(const X* x, const Q8Block* w, int64_t k) {
  double sum = 0;
  for (int64_t first = 0; first < k; first += kQ8Block, ++w) {
    double block = 0;
    for (int64_t i = 0; i < std::min(kQ8Block, k - first); ++i)
      block += to_double(x[first + i]) * w->codes[i];
    sum += block * bf16_to_float(w->scale);
  }
  return sum;
}

// One output's row of an FP8 weight.
struct Fp8Row {
  const uint8_t* codes;
  const float* scales;
  int64_t col_block;
};

template <class X>
double dot(const X* x, const Fp8Row& w, int64_t k) {
  double sum = 0;
  for (int64_t first = 0, b = 0; first < k; first += w.col_block, ++b) {
    double block = 0;
    for (int64_t i = first; i < std::min(first + w.col_block, k); ++i)
      block += to_double(x[i]) * static_cast<double>(e4m3_decode(w.codes[i]));
    sum += block * static_cast<double>(w.scales[b]);
  }
  return sum;
}

const bf16* bf16_row(const LinearArgs& a, int64_t n) {
  return static_cast<const bf16*>(a.weight) + n * a.x.cols;
}
const Q8Block* q8_row(const LinearArgs& a, int64_t n) {
  return static_cast<const Q8Block*>(a.weight) + n * q8_blocks(a.x.cols);
}
Fp8Row fp8_row(const LinearArgs& a, int64_t n) {
  const Fp8LinearView& w = a.fp8;
  const int64_t scales_per_row = (a.x.cols + w.col_block - 1) / w.col_block;
  return {w.codes + n * a.x.cols, w.scales + n / w.row_block * scales_per_row, w.col_block};
}

template <class X, auto kRow>
void linear_outputs(const LinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < a.x.rows; ++t) {
    for (int64_t n = begin; n < end; ++n) {
      const X* x = static_cast<const X*>(a.x.data) + t * a.x.cols;
      double sum = dot(x, kRow(a, n), a.x.cols);
      float& out = a.out[t * a.n + n];
      if (a.bias != nullptr) sum += a.bias[n];
      if (a.accumulate) sum += out;
      out = static_cast<float>(sum);
    }
  }
}

template <auto kRow>
void linear_of(const LinearArgs& a, ThreadPool& pool) {
  pool.run((a.n + kOutputsPerChunk - 1) / kOutputsPerChunk, [&](int64_t chunk, int) {
    const int64_t begin = chunk * kOutputsPerChunk, end = std::min(a.n, begin + kOutputsPerChunk);
    if (a.x.dtype == DType::kF32)
      linear_outputs<float, kRow>(a, begin, end);
    else
      linear_outputs<bf16, kRow>(a, begin, end);
  });
}

}  // namespace

void linear(const LinearArgs& a, ThreadPool& pool) {
  a.format == LinearFormat::kFp8 ? linear_of<fp8_row>(a, pool) : linear_of<bf16_row>(a, pool);
}
void linear_q8(const LinearArgs& a, ThreadPool& pool) {
  a.format == LinearFormat::kFp8 ? linear_of<fp8_row>(a, pool) : linear_of<q8_row>(a, pool);
}

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
