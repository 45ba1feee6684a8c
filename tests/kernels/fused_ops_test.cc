// The fused ops of every CPU table give the same bits as the separate ops.
#include <algorithm>

#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

class FusedOps : public testing::TestWithParam<const DenseOps*> {
 protected:
  const DenseOps& ops() const { return *GetParam(); }
  ThreadPool pool_{2};
};

TEST_P(FusedOps, NormLinear) {
  constexpr int64_t kN = 48, kK = 70;
  for (int64_t t : {0, 1, 9})
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      Random random(1);
      const std::vector<float> x = random.normal(t * kK, 3), weight = random.normal(kK),
                               bias = random.normal(kN);
      const std::vector<bf16> w = to_bf16(random.normal(kN * kK));
      std::vector<bf16> packed(
          static_cast<size_t>(linear_weight_bytes(kN, kK, ops().linear_layout)) / sizeof(bf16) + 32);
      bf16* aligned =
          packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64 / sizeof(bf16);
      pack_linear_weight(w.data(), kN, kK, ops().linear_layout, aligned, pool_);
      std::vector<float> composed(static_cast<size_t>(t * kN), 1.0f), fused = composed;
      ActBuffer normed(dtype, t, kK), scratch(dtype, t, kK);
      const RmsNormArgs norm{x.data(), weight.data(), 1e-5f, normed.view(), nullptr};
      ops().rms_norm(norm, pool_);
      ops().linear({normed.view(), aligned, bias.data(), composed.data(), kN, true}, pool_);
      ops().norm_linear({{x.data(), weight.data(), 1e-5f, scratch.view(), nullptr},
                         {scratch.view(), aligned, bias.data(), fused.data(), kN, true}},
                        pool_);
      EXPECT_TRUE(same_bits(fused, composed)) << t;
    }
}

TEST_P(FusedOps, RopeAttention) {
  constexpr int64_t kTokens = 5, kStride = (4 + 2 + 2 + 4) * 16;  // q, k, v, gate
  constexpr int kPageSize = 4, kHeadDim = 16;
  Random random(2);
  const std::vector<float> rows = random.normal(kTokens * kStride), inv_freq = random.normal(kHeadDim / 2),
                           norms = random.normal(2 * kHeadDim);
  const std::vector<int64_t> positions = {3, 4, 5, 6, 7};
  const int32_t pages[] = {1, 0};
  const SequenceRows sequence[] = {{0, kTokens, 3, pages}};
  const auto run = [&](bool is_fused, bool has_norms, bool has_gate) {
    std::vector<float> x = rows, k(2 * 2 * kPageSize * kHeadDim, 42), v = k;
    const RopeArgs q{x.data(), positions.data(), inv_freq.data(), 1.5f, kTokens, kStride,
                     4,        kHeadDim,         kHeadDim};
    RopeArgs key = q;
    key.x += 4 * kHeadDim, key.num_heads = 2;
    const KvWriteArgs kv{key.x,
                         key.x + 2 * kHeadDim,
                         kStride,
                         {k.data(), DType::kF32, 2, kPageSize, kHeadDim, 0},
                         {v.data(), DType::kF32, 2, kPageSize, kHeadDim, 0},
                         sequence,
                         nullptr};
    std::vector<float> out(kTokens * 4 * kHeadDim);
    AttentionArgs attention;
    attention.q = x.data(), attention.q_stride = kStride, attention.num_heads = 4;
    attention.k_pages = kv.k_pages, attention.v_pages = kv.v_pages, attention.sequences = sequence;
    attention.scale = 0.25f;
    attention.out = {out.data(), DType::kF32, kTokens, 4 * kHeadDim};
    const QkNorm norm = has_norms ? QkNorm{norms.data(), norms.data() + kHeadDim, 1e-5f} : QkNorm();
    const float* const gate = x.data() + (4 + 2 + 2) * kHeadDim;
    if (is_fused) {
      ops().rope_attention({{q, key, kv, norm}, attention, has_gate ? gate : nullptr, kStride}, pool_);
    } else {
      if (has_norms) {
        ops().head_norm({q.x, norm.q, norm.eps, kTokens, kStride, 4, kHeadDim}, pool_);
        ops().head_norm({key.x, norm.k, norm.eps, kTokens, kStride, 2, kHeadDim}, pool_);
      }
      ops().rope(q, pool_);
      ops().rope(key, pool_);
      ops().kv_write(kv, pool_);
      ops().attention(attention, pool_);
      if (has_gate) ops().mul_sigmoid({attention.out, gate, kStride, kHeadDim, 4, kHeadDim}, pool_);
    }
    x.insert(x.end(), out.begin(), out.end());
    x.insert(x.end(), k.begin(), k.end());
    x.insert(x.end(), v.begin(), v.end());
    return x;
  };
  for (const bool has_norms : {false, true})
    for (const bool has_gate : {false, true})
      EXPECT_TRUE(same_bits(run(true, has_norms, has_gate), run(false, has_norms, has_gate)));
  EXPECT_FALSE(std::ranges::equal(run(true, false, false), run(true, true, false)));
  EXPECT_FALSE(std::ranges::equal(run(true, false, false), run(true, false, true)));
}

// Keys [latents, rotary part] and queries [other part, rotary part]; the rotated queries in place or
// elsewhere.
TEST_P(FusedOps, LatentRope) {
  constexpr int64_t kTokens = 5, kLatent = 24, kRotary = 8, kKey = kLatent + kRotary, kQuery = 20, kHeads = 3;
  constexpr int kPageSize = 4;
  Random random(3);
  const std::vector<float> keys = random.normal(kTokens * kKey),
                           queries = random.normal(kTokens * kHeads * kQuery),
                           inv_freq = random.normal(kRotary / 2), weight = random.normal(kLatent);
  const std::vector<int64_t> positions = {3, 4, 5, 6, 7};
  const int32_t table[] = {1, 0};
  const SequenceRows sequence[] = {{0, kTokens, 3, table}};
  const auto run = [&](bool is_fused, bool has_copy) {
    std::vector<float> k = keys, q = queries, pages(2 * kPageSize * kKey, 42),
                       wide(kTokens * kHeads * kKey, 7);
    LatentRopeArgs a;
    a.q = {q.data() + kQuery - kRotary,
           positions.data(),
           inv_freq.data(),
           1.5f,
           kTokens,
           kHeads * kQuery,
           kHeads,
           kQuery,
           kRotary};
    if (has_copy) a.q_out = wide.data() + kLatent, a.q_out_stride = kHeads * kKey, a.q_out_head_stride = kKey;
    a.k = {k.data() + kLatent, positions.data(), inv_freq.data(), 1.5f, kTokens, kKey, 1, kRotary, kRotary};
    a.latents = {k.data(), weight.data(), 1e-5f, kTokens, kKey, 1, kLatent};
    a.kv = {k.data(), nullptr,  kKey,   {pages.data(), DType::kF32, 1, kPageSize, kKey, 0},
            {},       sequence, nullptr};
    if (is_fused) {
      ops().latent_rope(a, pool_);
    } else {
      ops().head_norm(a.latents, pool_);
      ops().rope(a.k, pool_);
      ops().kv_write(a.kv, pool_);
      ops().rope(a.q, pool_);
      if (has_copy)
        ops().copy_heads(
            {a.q.x, kHeads * kQuery, kQuery, a.q_out, kHeads * kKey, kKey, kTokens, kRotary, kHeads}, pool_);
    }
    if (!has_copy) pages.insert(pages.end(), q.begin(), q.end());
    pages.insert(pages.end(), wide.begin(), wide.end());
    return pages;
  };
  for (const bool has_copy : {false, true}) EXPECT_TRUE(same_bits(run(true, has_copy), run(false, has_copy)));
  EXPECT_NE(std::ranges::count(run(true, true), 7.0f), kTokens * kHeads * kKey);
}

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = cpu_tables();
  tables.push_back(&ref_dense_ops());
  return tables;
}
INSTANTIATE_TEST_SUITE_P(Tables, FusedOps, testing::ValuesIn(all_tables()),
                         [](const auto& p) { return std::string(p.param->name); });

}  // namespace
}  // namespace fp4moe
