// Compares multi-head latent attention, as a model runs it on the dense ops (absorbed: one shared latent
// "head" whose values are a prefix of its keys), with naive attention in double on decompressed keys and
// values.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/buffer.h"
#include "formats/e4m3.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct MlaShape {
  int heads, nope, rope, latent, v_dim;  // per head: keys nope + rope, values v_dim; kv_lora_rank latent
};

struct MlaCase {
  MlaShape s;
  int64_t tokens;
  DType dtype;                   // of the pages
  std::vector<float> q, rows;    // [T, heads, nope + rope], [T, latent + rope]
  std::vector<bf16> up_k, up_v;  // [heads, nope, latent], [heads, v_dim, latent]
  static constexpr int kPageSize = 16, kPad = 8;
  static constexpr float kScale = 0.25f;  // of E4M3 codes

  MlaCase(MlaShape shape, int64_t t, DType d) : s(shape), tokens(t), dtype(d) {
    Random random(13);
    q = random.normal(t * s.heads * (s.nope + s.rope), 2);
    rows = random.normal(t * row_dim());
    up_k = to_bf16(random.normal(int64_t{s.heads} * s.nope * s.latent, 1 / std::sqrt(float(s.latent))));
    up_v = to_bf16(random.normal(int64_t{s.heads} * s.v_dim * s.latent, 1 / std::sqrt(float(s.latent))));
  }
  int row_dim() const { return s.latent + s.rope; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(s.nope + s.rope)); }
  const float* q_at(int64_t t, int h) const { return q.data() + (t * s.heads + h) * (s.nope + s.rope); }
  float k_weight(int h, int n, int l) const {
    return bf16_to_float(up_k[static_cast<size_t>((h * s.nope + n) * s.latent + l)]);
  }
  float v_weight(int h, int v, int l) const {
    return bf16_to_float(up_v[static_cast<size_t>((h * s.v_dim + v) * s.latent + l)]);
  }
  // Element i of row t, as stored in the pages.
  double row_at(int64_t t, int i) const {
    const float x = rows[static_cast<size_t>(t * row_dim() + i)];
    if (dtype == DType::kF8E4M3) return static_cast<double>(e4m3_decode(e4m3_encode(x / kScale))) * kScale;
    return dtype == DType::kF32 ? x : round_to_bf16(x);
  }

  // Packs `heads` matrices [n, k] into the table's layout.
  static Buffer pack(const DenseOps& ops, const std::vector<bf16>& w, int heads, int n, int k,
                     ThreadPool& pool) {
    const int64_t bytes = linear_weight_bytes(n, k, ops.head_linear_layout);
    Buffer packed = *Buffer::make(heads * bytes);
    for (int h = 0; h < heads; ++h)
      pack_linear_weight(w.data() + int64_t{h} * n * k, n, k, ops.head_linear_layout,
                         reinterpret_cast<bf16*>(packed.data() + h * bytes), pool);
    return packed;
  }

  // Returns the nope part of q times W_UK^T, followed by its rope part: [T, heads, latent + rope].
  std::vector<float> absorbed_q(const DenseOps& ops, ThreadPool& pool) const {
    std::vector<bf16> transposed;
    for (int h = 0; h < s.heads; ++h)
      for (int l = 0; l < s.latent; ++l)
        for (int n = 0; n < s.nope; ++n)
          transposed.push_back(up_k[static_cast<size_t>((h * s.nope + n) * s.latent + l)]);
    const Buffer weight = pack(ops, transposed, s.heads, s.latent, s.nope, pool);
    std::vector<float> absorbed(static_cast<size_t>(tokens * s.heads * row_dim()));
    ops.head_linear({.x = q.data(),
                     .x_stride = int64_t{s.heads} * (s.nope + s.rope),
                     .x_head_stride = s.nope + s.rope,
                     .weight = weight.as<bf16>(),
                     .out = absorbed.data(),
                     .out_stride = int64_t{s.heads} * row_dim(),
                     .out_head_stride = row_dim(),
                     .num_tokens = tokens,
                     .n = s.latent,
                     .k = s.nope,
                     .num_heads = s.heads},
                    pool);
    for (int64_t t = 0; t < tokens; ++t)
      for (int h = 0; h < s.heads; ++h)
        std::copy_n(q_at(t, h) + s.nope, s.rope, absorbed.begin() + (t * s.heads + h) * row_dim() + s.latent);
    return absorbed;
  }

  // [T, heads, v_dim]
  std::vector<float> run(const DenseOps& ops, ThreadPool& pool) const {
    const int64_t pages = (tokens + kPageSize - 1) / kPageSize;
    const int stride = row_dim() + kPad;
    std::vector<uint8_t> cache(static_cast<size_t>(pages * kPageSize * stride * dtype_bits(dtype) / 8),
                               0xff);  // NaN in every type
    const float page_scale = dtype == DType::kF8E4M3 ? kScale : 1;
    std::vector<int32_t> table;
    for (int64_t p = pages; p > 0; --p) table.push_back(static_cast<int32_t>(p - 1));
    const SequenceRows sequences[] = {{0, tokens, 0, table}};
    const KvPages k = {cache.data(), dtype, 1, kPageSize, row_dim(), stride, page_scale};
    const KvPages v = {cache.data(), dtype, 1, kPageSize, s.latent, stride, page_scale};
    ops.kv_write({rows.data(), nullptr, row_dim(), k, v, sequences}, pool);

    const std::vector<float> absorbed = absorbed_q(ops, pool);
    ActBuffer latents(DType::kF32, tokens, int64_t{s.heads} * s.latent);
    ops.attention({.q = absorbed.data(),
                   .q_stride = int64_t{s.heads} * row_dim(),
                   .k_pages = k,
                   .v_pages = v,
                   .sequences = sequences,
                   .num_heads = s.heads,
                   .scale = scale(),
                   .out = latents.view()},
                  pool);
    const Buffer weight = pack(ops, up_v, s.heads, s.v_dim, s.latent, pool);
    std::vector<float> out(static_cast<size_t>(tokens * s.heads * s.v_dim));
    ops.head_linear({.x = static_cast<const float*>(latents.view().data),
                     .x_stride = int64_t{s.heads} * s.latent,
                     .x_head_stride = s.latent,
                     .weight = weight.as<bf16>(),
                     .out = out.data(),
                     .out_stride = int64_t{s.heads} * s.v_dim,
                     .out_head_stride = s.v_dim,
                     .num_tokens = tokens,
                     .n = s.v_dim,
                     .k = s.latent,
                     .num_heads = s.heads},
                    pool);
    return out;
  }
};

// Naive attention: decompresses every key and value of a head and computes the softmax in double. The budget
// follows the f32 steps of the kernels: a logit whose terms sum to M in magnitude has an error of (nope +
// latent + rope + 4) eps M. The numerator and the denominator of a weight each have that error plus exp's
// 2.5e-7, and n additions round. The output sums `latent` terms.
struct Naive {
  std::vector<float> values, budget;
  explicit Naive(const MlaCase& c) {
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int h = 0; h < c.s.heads; ++h) attend(c, t, h);
  }

 private:
  void attend(const MlaCase& c, int64_t t, int h) {
    const MlaShape& s = c.s;
    const float* q = c.q_at(t, h);
    std::vector<double> logits;
    double magnitude = 0;
    for (int64_t j = 0; j <= t; ++j) {
      double logit = 0, terms = 0;
      for (int n = 0; n < s.nope; ++n) {
        double key = 0, key_terms = 0;
        for (int l = 0; l < s.latent; ++l) {
          const double term = c.k_weight(h, n, l) * c.row_at(j, l);
          key += term, key_terms += std::abs(term);
        }
        logit += q[n] * key, terms += std::abs(q[n]) * key_terms;
      }
      for (int r = 0; r < s.rope; ++r) {
        const double term = q[s.nope + r] * c.row_at(j, s.latent + r);
        logit += term, terms += std::abs(term);
      }
      logits.push_back(logit * c.scale());
      magnitude = std::max(magnitude, terms * c.scale());
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double denominator = 0;
    for (double& p : logits) denominator += p = std::exp(p - largest);
    const double weight_error =
        2 * ((s.nope + s.latent + s.rope + 4) * kF32Eps * magnitude + 2.5e-7) + (2.0 * t + 6) * kF32Eps;
    for (int v = 0; v < s.v_dim; ++v) {
      double sum = 0, terms = 0;
      for (int64_t j = 0; j <= t; ++j) {
        double value = 0;
        for (int l = 0; l < s.latent; ++l) {
          const double term = c.v_weight(h, v, l) * c.row_at(j, l);
          value += term, terms += std::abs(term) * logits[static_cast<size_t>(j)];
        }
        sum += value * logits[static_cast<size_t>(j)];
      }
      values.push_back(static_cast<float>(sum / denominator));
      budget.push_back(static_cast<float>((weight_error + (s.latent + 2) * kF32Eps) * terms / denominator));
    }
  }
};

class MlaAttention : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {};

TEST_P(MlaAttention, AbsorbedEqualsNaive) {
  ThreadPool pool(2);
  const auto& [ops, dtype] = GetParam();
  for (auto [shape, tokens] : {std::pair{MlaShape{5, 24, 8, 40, 20}, int64_t{70}},
                               {MlaShape{1, 7, 3, 9, 5}, 17},
                               {MlaShape{2, 128, 64, 512, 128}, 5}}) {
    const MlaCase c(shape, tokens, dtype);
    const Naive naive(c);
    const std::vector<float> actual = c.run(*ops, pool);
    EXPECT_TRUE(within_budget(actual, naive.values, naive.budget)) << "latent " << shape.latent;
    EXPECT_TRUE(within_relative_l2(actual, naive.values, 3e-6)) << "latent " << shape.latent;
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, MlaAttention,
                         testing::Combine(testing::ValuesIn([] {
                                            std::vector<const DenseOps*> tables = cpu_tables();
                                            tables.push_back(&ref_dense_ops());
                                            return tables;
                                          }()),
                                          testing::Values(DType::kBF16, DType::kF32, DType::kF8E4M3)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)->name) + "_" +
                                  dtype_name(std::get<1>(p.param));
                         });

}  // namespace
}  // namespace fp4moe
