// bf16 weights that are quantised to FP8 at load.
#include <cstring>

#include "base/relative_l2.h"
#include "formats/fp8.h"
#include "kernels/dense_case.h"
#include "kernels/fp8_word.h"

namespace fp4moe {
namespace {

Fp8Weight quantize(const std::vector<bf16>& weight, int64_t n, int64_t k, const DenseOps& ops) {
  ThreadPool pool(3);
  return put_quantized_fp8_weight([&](Buffer&) -> Result<const bf16*> { return weight.data(); }, n, k, ops,
                                  pool)
      .value();
}

TEST(QuantizedFp8Weight, RowsAreThoseOfTheQuantiser) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {15, 47}, {16, 64}, {33, 31}, {50, 300}}) {
    std::vector<bf16> weight = to_bf16(Random(static_cast<uint64_t>(n)).normal(n * k));
    for (int64_t i = 0; i < k; ++i) weight[static_cast<size_t>((n - 1) * k + i)] = {};  // a row of zeros
    const Fp8Weight found = quantize(weight, n, k, ref_dense_ops());
    EXPECT_EQ(found.view.row_block, 1);
    EXPECT_EQ(found.view.col_block, k);
    EXPECT_EQ(found.storage.num_bytes(),
              fp8_weight_bytes(quantized_fp8_shape(n, k), LinearLayout::kRowMajorFp8));
    std::vector<uint8_t> codes(static_cast<size_t>(k));
    for (int64_t r = 0; r < n; ++r) {
      const float scale = fp8_quantize_token(weight.data() + r * k, k, codes.data());
      EXPECT_EQ(found.view.scales[r], scale) << n << " x " << k << " row " << r;
      EXPECT_EQ(std::memcmp(found.view.codes + r * k, codes.data(), codes.size()), 0)
          << n << " x " << k << " row " << r;
    }
  }
}

// The error that docs/numerics.md states.
TEST(QuantizedFp8Weight, ErrorOfNormalWeights) {
  constexpr int64_t kN = 64, kK = 2880;
  const std::vector<float> values = to_float(to_bf16(Random(5).normal(kN * kK, 0.02f)));
  const Fp8Weight found = quantize(to_bf16(values), kN, kK, ref_dense_ops());
  std::vector<float> back(values.size());
  for (int64_t r = 0; r < kN; ++r) fp8_dequantize_row(found.view, kK, r, back.data() + r * kK);
  const double error = relative_l2(back, values);
  EXPECT_GT(error, 0.025);
  EXPECT_LT(error, 0.028);
}

// Every pair of codes in every place of a word, read as the comment of fp8_half_word() says.
TEST(Fp8Words, HoldEveryCode) {
  for (int first = 0; first < 256; ++first)
    for (int second = 0; second < 256; ++second)
      for (int column = 0; column < 8; ++column) {
        uint8_t group[kFp8WordGroup] = {};
        group[column] = static_cast<uint8_t>(first), group[column + 8] = static_cast<uint8_t>(second);
        for (int q = 0; q < 4; ++q) {
          const uint32_t word = fp8_word(group, q);
          const uint32_t half = q == column / 2 ? word >> 16 * (column % 2) & 0xffff : 0;
          ASSERT_EQ(word, q == column / 2 ? half << 16 * (column % 2) : 0u);
          if (q != column / 2) continue;
          ASSERT_EQ((half >> 15) << 7 | (half >> 4 & 0x7f), static_cast<uint32_t>(first));
          ASSERT_EQ((half >> 11 & 1) << 7 | (half >> 12 & 7) << 4 | (half & 0xf),
                    static_cast<uint32_t>(second));
          // The masks give the same bits in the places of a bf16's exponent and fraction.
          ASSERT_EQ(half & kFp8FirstPair & 0xffff,
                    static_cast<uint32_t>((first & 0x80) << 8 | (first & 0x7f) << 4));
          const uint32_t moved = (word << 4 & kFp8SecondLeft) | (word >> 4 & kFp8SecondRight);
          ASSERT_EQ(moved, static_cast<uint32_t>((second & 0x80) << 8 | (second & 0x7f) << 4)
                               << 16 * (column % 2));
        }
      }
}

// Tables for --dense-quant fp8 differ from the others only in the layout of bf16 weights.
TEST(QuantizedFp8Weight, EveryTableMultipliesByIt) {
  constexpr int64_t kT = 3, kN = 37, kK = 90;
  std::vector<const DenseOps*> tables = cpu_tables(DenseQuant::kFp8);
  tables.push_back(&ref_dense_ops(DenseQuant::kFp8));
  const std::vector<float> w = Random(1).normal(kN * kK), x = Random(2).normal(kT * kK);
  ThreadPool pool(2);
  std::vector<float> expected;
  for (const DenseOps* ops : tables) {
    EXPECT_EQ(linear_format(ops->linear_layout), LinearFormat::kFp8) << ops->name;
    EXPECT_EQ(ops->linear_layout, ops->fp8_layout) << ops->name;
    const Fp8Weight weight = quantize(to_bf16(w), kN, kK, *ops);
    ActBuffer act(DType::kBF16, kT, kK, x);
    std::vector<float> out(kT * kN);
    ops->linear(
        {.x = act.view(), .out = out.data(), .n = kN, .format = LinearFormat::kFp8, .fp8 = weight.view},
        pool);
    if (expected.empty()) expected = out;
    EXPECT_LE(relative_l2(out, expected), 1e-6) << ops->name;
  }
}

}  // namespace
}  // namespace fp4moe
