// The ops that copy, add or gate rows; the CPU tables use them too, except silu_mul() and mul_sigmoid().
#include <cmath>
#include <cstring>

#include "base/run_ranges.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

constexpr int64_t kAddElems = 1 << 15;  // per chunk
constexpr int64_t kRowsPerChunk = 16;

}  // namespace

void embed(const EmbedArgs& a, ThreadPool& pool) {
  pool.run(a.num_tokens, [&](int64_t t, int) {
    const bf16* row = a.table + a.ids[t] * a.hidden_size;
    for (int64_t i = 0; i < a.hidden_size; ++i) a.out[t * a.hidden_size + i] = bf16_to_float(row[i]);
  });
}

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

void add(const AddArgs& a, ThreadPool& pool) {
  run_ranges(pool, a.count, kAddElems, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) a.out[i] += a.x[i];
  });
}

void gather_rows(const GatherRowsArgs& a, ThreadPool&) {
  const auto* x = static_cast<const uint8_t*>(a.x);
  auto* out = static_cast<uint8_t*>(a.out);
  for (int64_t i = 0; i < a.num_rows; ++i)
    std::memcpy(out + i * a.row_bytes, x + a.rows[i] * a.row_bytes, static_cast<size_t>(a.row_bytes));
}

void copy_heads(const CopyHeadsArgs& a, ThreadPool& pool) {
  run_ranges(pool, a.num_tokens, kRowsPerChunk, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t h = 0; h < a.num_heads; ++h)
        std::memcpy(a.out + t * a.out_stride + h * a.out_head_stride,
                    a.x + t * a.x_stride + h * a.x_head_stride, static_cast<size_t>(a.n) * sizeof(float));
  });
}

void convert_rows(const ConvertRowsArgs& a, ThreadPool& pool) {
  run_ranges(pool, a.num_tokens, kRowsPerChunk, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t i = 0; i < a.n; ++i)
        store_elem(a.out, a.out_dtype, t * a.out_stride + i, a.x[t * a.x_stride + i]);
  });
}

void sigmoid_gate(const SigmoidGateArgs& a, ThreadPool& pool) {
  run_ranges(pool, a.num_tokens, kRowsPerChunk, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      double logit = 0;
      for (int64_t i = 0; i < a.hidden_size; ++i)
        logit += static_cast<double>(a.x[t * a.hidden_size + i]) * a.weight[i];
      const auto gate = static_cast<float>(1 / (1 + std::exp(-logit)));
      for (int64_t i = 0; i < a.hidden_size; ++i) a.out[t * a.hidden_size + i] *= gate;
    }
  });
}

void mul_sigmoid(const MulSigmoidArgs& a, ThreadPool& pool) {
  pool.run(a.x.rows, [&](int64_t t, int) {
    for (int64_t i = 0; i < a.x.cols; ++i) {
      const double gate = a.gate[t * a.gate_stride + i / a.head_dim * a.gate_head_stride + i % a.head_dim];
      const double y = load_elem(a.x.data, a.x.dtype, t * a.x.cols + i) / (1 + std::exp(-gate));
      store_elem(a.x.data, a.x.dtype, t * a.x.cols + i, static_cast<float>(y));
    }
  });
}

}  // namespace fp4moe::ref
