#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/e4m3.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

double page_value(const KvPages& pages, int64_t i) {
  if (pages.dtype != DType::kF8E4M3) return load_elem(pages.data, pages.dtype, i);
  return static_cast<double>(e4m3_decode(static_cast<const uint8_t*>(pages.data)[i])) * pages.scale;
}

// Computes one query row of one head, in two passes over the keys: the first finds the largest logit.
void attend(const AttentionArgs& a, const SequenceRows& s, int64_t r, int head) {
  const KvPages &k = a.k_pages, &v = a.v_pages;
  const int kv_head = head / (a.num_heads / k.num_kv_heads);
  const int64_t position = s.first_position + r;
  const int64_t first_key = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
  const float* q = a.q + (s.first_row + r) * a.q_stride + static_cast<int64_t>(head) * k.head_dim;
  auto logit = [&](int64_t key) {
    const int64_t offset = k.offset(s.page_table.data(), kv_head, key);
    double sum = 0;
    for (int d = 0; d < k.head_dim; ++d) sum += static_cast<double>(q[d]) * page_value(k, offset + d);
    return sum * a.scale;
  };
  double largest = a.sinks != nullptr ? a.sinks[head] : -std::numeric_limits<double>::infinity();
  for (int64_t key = first_key; key <= position; ++key) largest = std::max(largest, logit(key));

  double denominator = a.sinks != nullptr ? std::exp(a.sinks[head] - largest) : 0;
  double sums[kMaxHeadDim] = {};
  for (int64_t key = first_key; key <= position; ++key) {
    const double p = std::exp(logit(key) - largest);
    const int64_t offset = v.offset(s.page_table.data(), kv_head, key);
    denominator += p;
    for (int d = 0; d < v.head_dim; ++d) sums[d] += p * page_value(v, offset + d);
  }
  const int64_t out = (s.first_row + r) * a.out.cols + static_cast<int64_t>(head) * v.head_dim;
  for (int d = 0; d < v.head_dim; ++d)
    store_elem(a.out.data, a.out.dtype, out + d, static_cast<float>(sums[d] / denominator));
}

}  // namespace

void attention(const AttentionArgs& a, ThreadPool& pool) {
  for (const SequenceRows& s : a.sequences)
    pool.run(s.num_rows * a.num_heads, [&](int64_t chunk, int) {
      attend(a, s, chunk / a.num_heads, static_cast<int>(chunk % a.num_heads));
    });
}

}  // namespace fp4moe::ref
