// Dense linear layers and sampling on a GPU: microseconds per call in a CUDA graph of several calls, median
// of 20 replays. Rotates through more weights than the L2 holds. Prints the tables of
// docs/perf_log/decode_gpu.md.
//
//   dense_cuda_bench [linear|head_linear|sample]...
#include <algorithm>
#include <cstdio>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "cuda_timing.h"
#include "kernels/device_peak.h"
#include "kernels/device_sampler.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int64_t kColdBytes = 200'000'000;

// The weights of a linear layer [N, K], bf16 or FP8 with a scale per row, more often than the L2 holds.
class ColdWeights {
 public:
  ColdWeights(LinearFormat format, int64_t n, int64_t k)
      : format_(format),
        n_(n),
        k_(k),
        copies_(std::max<int64_t>(2, kColdBytes / num_bytes() + 1)),
        weights_(device_buffer(num_bytes() * copies_)),
        scales_(device_buffer(n * 4)) {
    sm90_peak_ops()->fill_normal(weights_.as<bf16>(), num_bytes() * copies_ / 2, 1);  // any codes are as fast
  }

  bool is_fp8() const { return format_ == LinearFormat::kFp8; }
  const char* name() const { return is_fp8() ? "fp8 " : "bf16"; }
  int64_t num_bytes() const { return n_ * k_ * (is_fp8() ? 1 : 2); }
  // The arguments of call number i.
  LinearArgs args(int64_t i, const ActRows& x, float* out) const {
    const uint8_t* weight = weights_.data() + i % copies_ * num_bytes();
    return {.x = x,
            .weight = is_fp8() ? nullptr : weight,
            .bias = nullptr,
            .out = out,
            .n = n_,
            .accumulate = false,
            .format = format_,
            .fp8 = is_fp8() ? Fp8LinearView{weight, scales_.as<float>(), 1, k_} : Fp8LinearView()};
  }

 private:
  LinearFormat format_;
  int64_t n_, k_, copies_;
  Buffer weights_, scales_;
};

void bench_linear(Stream& stream, LinearFormat format, int64_t t, int64_t n, int64_t k) {
  const DenseOps& ops = *cuda_dense_ops();
  ThreadPool pool(1);
  const ColdWeights weights(format, n, k);
  const Buffer x = device_buffer(t * k * 2), out = device_buffer(t * n * 4);
  sm90_peak_ops()->fill_normal(x.as<bf16>(), t * k, 2);
  const int num_calls = weights.num_bytes() > kColdBytes ? 4 : t >= 512 ? 6 : 24;
  const double us = median_us(stream, num_calls, [&](int64_t i) {
    ops.linear(weights.args(i, {x.as<bf16>(), DType::kBF16, t, k}, out.as<float>()), pool);
  });
  std::printf("linear %s %6lld x %-5lld T=%-5lld %9.2f us %6.0f GB/s %6.0f TFLOP/s\n", weights.name(),
              static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(t), us,
              static_cast<double>(weights.num_bytes()) / us * 1e-3,
              2e-6 * static_cast<double>(t * n * k) / us);
}

// norm_linear with one layer, as before attention or a delta net.
void bench_norm_linear(Stream& stream, LinearFormat format, int64_t t, int64_t n, int64_t k) {
  const DenseOps& ops = *cuda_dense_ops();
  ThreadPool pool(1);
  const ColdWeights weights(format, n, k);
  const Buffer x = device_buffer(t * k * 4), norm = device_buffer(k * 4), act = device_buffer(t * k * 2),
               out = device_buffer(t * n * 4);
  const ActRows normed{act.as<bf16>(), DType::kBF16, t, k};
  const double us = median_us(stream, 24, [&](int64_t i) {
    ops.norm_linear(
        {.norm = {.x = x.as<float>(), .weight = norm.as<float>(), .eps = 1e-6f, .out_act = normed},
         .linear = weights.args(i, normed, out.as<float>())},
        pool);
  });
  std::printf("norm + linear %s %6lld x %-5lld T=%-3lld %9.2f us %6.0f GB/s\n", weights.name(),
              static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(t), us,
              static_cast<double>(weights.num_bytes()) / us * 1e-3);
}

// MLA's absorbed projections: queries [T, heads, 192] to latents [T, heads, 576], or latents to values.
void bench_head_linear(Stream& stream, int64_t t, int64_t n, int64_t k, int heads) {
  const DenseOps& ops = *cuda_dense_ops();
  ThreadPool pool(1);
  const int64_t x_head = k == 128 ? 192 : k, out_head = n == 512 ? 576 : n, weights = heads * n * k;
  const int64_t copies = kColdBytes / (weights * 2) + 1;
  const Buffer weight = device_buffer(copies * weights * 2), x = device_buffer(t * heads * x_head * 4),
               out = device_buffer(t * heads * out_head * 4);
  sm90_peak_ops()->fill_normal(weight.as<bf16>(), copies * weights, 1);
  sm90_peak_ops()->fill_normal(x.as<bf16>(), t * heads * x_head * 2, 2);
  const double us = median_us(stream, t >= 512 ? 6 : 24, [&](int64_t i) {
    ops.head_linear({.x = x.as<float>(),
                     .x_stride = heads * x_head,
                     .x_head_stride = x_head,
                     .weight = weight.as<bf16>() + i % copies * weights,
                     .out = out.as<float>(),
                     .out_stride = heads * out_head,
                     .out_head_stride = out_head,
                     .num_tokens = t,
                     .n = n,
                     .k = k,
                     .num_heads = heads},
                    pool);
  });
  const auto bytes = static_cast<double>(weights * 2 + t * heads * (n + k) * 4);
  std::printf("%3d heads of %3lld x %-3lld T=%-4lld %9.2f us %6.0f GB/s %6.0f TFLOP/s\n", heads,
              static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(t), us,
              bytes / us * 1e-3, 2e-6 * static_cast<double>(t * weights) / us);
}

struct SamplingCase {
  const char* name;
  SampleRowParams params;
};

void bench_sampling(Stream& stream, int64_t rows, int64_t vocab_size, const SamplingCase& c) {
  std::vector<float> logits(static_cast<size_t>(rows * vocab_size));
  uint32_t state = 1;
  for (float& x : logits) {
    float sum = 0;  // of four uniform numbers, which is close enough to normal
    for (int i = 0; i < 4; ++i)
      sum += static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-24f;
    x = (sum - 2) * 5;
  }
  const std::vector<SampleRowParams> params(static_cast<size_t>(rows), c.params);
  const Buffer device_logits = device_buffer(rows * vocab_size * 4),
               device_params = device_buffer(rows * static_cast<int64_t>(sizeof(SampleRowParams))),
               out = device_buffer(rows * static_cast<int64_t>(sizeof(SampledRow)));
  must(device_memory().upload(device_logits.data(), logits.data(), device_logits.num_bytes()));
  must(device_memory().upload(device_params.data(), params.data(), device_params.num_bytes()));
  const double us = median_us(stream, 4, [&](int) {
    cuda_sample_rows()({.logits = device_logits.as<float>(),
                        .num_rows = rows,
                        .vocab_size = vocab_size,
                        .row_stride = vocab_size,
                        .masked = nullptr,
                        .params = device_params.as<SampleRowParams>(),
                        .edits = nullptr,
                        .all_greedy = is_plain_greedy(c.params),
                        .out = out.as<SampledRow>(),
                        .copy = nullptr});
  });
  std::printf("sample  V=%lld rows=%-3lld %-32s %8.1f us\n", static_cast<long long>(vocab_size),
              static_cast<long long>(rows), c.name, us);
}

void bench_linears(Stream& stream) {
  struct Shape {
    int64_t n, k;
  };
  for (const Shape& s : {Shape{12288, 2048}, {9216, 2048}, {5120, 2880}})
    for (const int64_t t : {1, 4, 64, 128})
      for (const LinearFormat format : {LinearFormat::kBf16, LinearFormat::kFp8})
        bench_norm_linear(stream, format, t, s.n, s.k);
  for (const Shape& s : {Shape{5120, 2880},
                         {2880, 4096},
                         {201088, 2880},
                         {24576, 1536},
                         {576, 7168},
                         {2048, 4096},
                         {12352, 2048},
                         {9216, 2048}})
    for (int64_t t : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 8192})
      for (const LinearFormat format : {LinearFormat::kBf16, LinearFormat::kFp8})
        if (t <= 64 || s.n < 100000) bench_linear(stream, format, t, s.n, s.k);
}

void bench_head_linears(Stream& stream) {
  for (const int heads : {128, 32})
    for (const int64_t t : {1, 4, 16, 32, 64, 128, 512, 8192}) {
      bench_head_linear(stream, t, 512, 128, heads);
      bench_head_linear(stream, t, 128, 512, heads);
    }
}

void bench_samplers(Stream& stream) {
  constexpr SamplingCase kCases[] = {
      {"greedy", {0.5, 0, 1, -1, -1}},      {"greedy, 5 logprobs", {0.5, 0, 1, -1, 5}},
      {"temperature", {0.5, 1, 1, -1, -1}}, {"top_p 0.95", {0.5, 1, 0.95f, -1, -1}},
      {"top_k 50", {0.5, 1, 1, 50, -1}},    {"top_k 50, top_p 0.9, 20 logprobs", {0.5, 1, 0.9f, 50, 20}}};
  for (int64_t rows : {1, 8, 64})
    for (const SamplingCase& c : kCases) bench_sampling(stream, rows, 201088, c);
}

void run(std::span<char*> names) {
  BenchGpu gpu;
  Stream& stream = gpu.stream;
  const auto is_wanted = [&](std::string_view name) { return names.empty() || has(names, name); };
  if (is_wanted("linear")) bench_linears(stream);
  if (is_wanted("head_linear")) bench_head_linears(stream);
  if (is_wanted("sample")) bench_samplers(stream);
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) { fp4moe::run(std::span(argv, static_cast<size_t>(argc)).subspan(1)); }
