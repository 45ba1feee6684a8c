// Compares gate_up() and down() of every table with sums in double computed directly from fp4_at().
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "kernels/expert_gemm_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

class ExpertGemmTest : public testing::TestWithParam<std::tuple<const ExpertOps*, Fp4Format>> {
 protected:
  const ExpertOps& ops() const { return *std::get<0>(GetParam()); }
  Fp4Format format() const { return std::get<1>(GetParam()); }
  std::vector<int64_t> widths() const {
    return format() == Fp4Format::kMxfp4 ? std::vector<int64_t>{32, 96, 192, 2880}
                                         : std::vector<int64_t>{16, 32, 48, 192, 2880};
  }
  std::vector<DType> act_types() const {
    return &ops() == &ref_expert_ops() ? std::vector<DType>{DType::kBF16, DType::kF32}
                                       : std::vector<DType>{DType::kBF16};
  }
};

std::string test_name(const testing::TestParamInfo<ExpertGemmTest::ParamType>& info) {
  return std::string(std::get<0>(info.param)->name) + "_" + fp4_format_name(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Tables, ExpertGemmTest,
                         testing::Combine(testing::ValuesIn(expert_tables()),
                                          testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4)),
                         test_name);

TEST_P(ExpertGemmTest, DownIsWithinBudgetForEveryNumberOfRows) {
  for (int64_t k : widths()) {
    Random random(static_cast<uint64_t>(k));
    const int64_t n = k == 2880 ? 32 : 48;
    const DownCase c(format(), n, k, random);
    for (DType dtype : act_types()) {
      ActBuffer x(dtype, 40, k, random.normal(40 * k));
      std::vector<float> expected, budget;
      c.expect(to_double(x.values()), expected, budget);
      for (int64_t rows : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 40}) {
        ActRows some = x.view();
        some.rows = rows;
        const size_t size = static_cast<size_t>(rows * n);
        EXPECT_TRUE(within_budget(c.run(ops(), some), {expected.data(), size}, {budget.data(), size}))
            << "K=" << k << " rows=" << rows << " " << dtype_name(dtype);
      }
    }
  }
}

TEST_P(ExpertGemmTest, GateUpIsWithinBudgetForEveryActivation) {
  for (const Activation& act : {kSwigluOai, kSwigluOther, kSilu, kRelu2}) {
    for (int64_t h : widths()) {
      Random random(static_cast<uint64_t>(h));
      const GateUpCase c(format(), h == 2880 ? 16 : 48, h, act, random);
      for (DType dtype : act_types()) {
        ActBuffer x(dtype, 17, h, random.normal(17 * h, 4.0f));  // wide enough to reach the clamp
        for (DType out_dtype : {DType::kBF16, DType::kF32}) {
          std::vector<float> expected, budget;
          c.expect(to_double(x.values()), out_dtype, expected, budget);
          for (int64_t rows : {0, 1, 2, 3, 5, 7, 12, 13, 17}) {
            ActRows some = x.view();
            some.rows = rows;
            const size_t size = static_cast<size_t>(rows * c.up.view().rows);
            EXPECT_TRUE(within_budget(c.run(ops(), some, {.out_dtype = out_dtype}), {expected.data(), size},
                                      {budget.data(), size}))
                << "activation " << int(act.kind) << " beta=" << act.beta << " H=" << h << " rows=" << rows
                << " " << dtype_name(dtype) << " -> " << dtype_name(out_dtype);
          }
        }
      }
    }
  }
}

TEST_P(ExpertGemmTest, WrongOrderOfGateAndUpFails) {
  for (const Activation& act : {kSwigluOai, kSilu}) {
    Random random(11);
    const GateUpCase c(format(), 48, 96, act, random);
    ActBuffer x(DType::kBF16, 5, 96, random.normal(5 * 96));
    std::vector<float> expected, budget;
    c.expect(to_double(x.values()), DType::kBF16, expected, budget);
    EXPECT_TRUE(within_budget(c.run(ops(), x.view()), expected, budget));
    EXPECT_FALSE(within_budget(c.run(ops(), x.view(), {.swapped = true}), expected, budget));
    EXPECT_FALSE(within_relative_l2(c.run(ops(), x.view(), {.swapped = true}), expected, 0.1));
  }
}

// A row of x with a single 1 selects one weight, so the code, scale byte and column are each checked exactly.
TEST_P(ExpertGemmTest, EveryCodeScaleByteAndColumnIsExact) {
  const int block = fp4_block(format());
  // Above byte 252, 6 * 2^(byte - 127) overflows f32; the loader rejects e4m3's NaN, 127.
  const int last_scale = format() == Fp4Format::kMxfp4 ? 252 : 126;
  Random random(5);
  for (int first = 0; first <= last_scale; first += 16) {
    DownCase c(format(), 16, 2 * block, random);
    c.bias.assign(16, 0.0f);
    for (int64_t r = 0; r < 16; ++r) {
      for (int64_t col = 0; col < 2 * block; col += 2)
        c.weight.code_byte(r, col) = static_cast<uint8_t>(((r + col) & 15) | ((r + col + 7) & 15) << 4);
      for (int64_t b = 0; b < 2; ++b)
        c.weight.scale_byte(r, b) = static_cast<uint8_t>(std::min<int64_t>(first + r, last_scale));
    }
    std::vector<float> identity(static_cast<size_t>(4 * block * block));
    for (int i = 0; i < 2 * block; ++i) identity[static_cast<size_t>(i * 2 * block + i)] = 1;
    ActBuffer x(DType::kBF16, 2 * block, 2 * block, identity);
    const std::vector<float> out = c.run(ops(), x.view());
    for (int64_t col = 0; col < 2 * block; ++col)
      for (int64_t r = 0; r < 16; ++r)
        ASSERT_EQ(out[static_cast<size_t>(col * 16 + r)], fp4_at(c.weight.view(), r, col))
            << "scale byte " << first + r << " row " << r << " column " << col;
  }
}

TEST_P(ExpertGemmTest, ARowGivesTheSameBitsAloneAndInAnyBatch) {
  const int64_t k = 288, n = 48, most = 300;
  Random random(7);
  const DownCase down(format(), n, k, random);
  const GateUpCase gate_up(format(), n, k, kSwigluOai, random);
  ActBuffer x(DType::kBF16, most, k, random.normal(most * k));
  std::vector<float> down_alone, gate_up_alone;
  for (int64_t t = 0; t < most; ++t) {
    const ActRows row = {static_cast<bf16*>(x.view().data) + t * k, DType::kBF16, 1, k};
    for (float v : down.run(ops(), row)) down_alone.push_back(v);
    for (float v : gate_up.run(ops(), row)) gate_up_alone.push_back(v);
  }
  const auto bytes = [](const std::vector<float>& v, int64_t rows) {
    return std::span(reinterpret_cast<const uint8_t*>(v.data()), static_cast<size_t>(rows * n * 4));
  };
  std::vector<int64_t> batches = {127, 128, 129, 145, 257, most};
  for (int64_t rows = 1; rows <= 40; ++rows) batches.push_back(rows);
  for (int64_t rows : batches) {
    ActRows some = x.view();
    some.rows = rows;
    EXPECT_TRUE(same_bytes(bytes(down.run(ops(), some), rows), bytes(down_alone, rows))) << rows;
    EXPECT_TRUE(same_bytes(bytes(gate_up.run(ops(), some), rows), bytes(gate_up_alone, rows))) << rows;
  }
}

// Kernels can have a separate path for such rows, because their sums can leave the normal range of f32.
TEST_P(ExpertGemmTest, ARowOfExtremeExponentsGivesTheSameBitsAloneAndInABatch) {
  const int64_t k = 288, n = 48, most = 32;
  const bool mxfp4 = format() == Fp4Format::kMxfp4;
  for (const int scale_byte : {1, 3, 64, 110, 126, mxfp4 ? 200 : 120, mxfp4 ? 253 : 119}) {
    for (const bool everywhere : {false, true}) {
      Random random(17);
      DownCase down(format(), n, k, random);
      down.bias.assign(n, 0.0f);  // a bias would hide small sums
      for (int64_t r = 0; r < n; ++r)
        for (int64_t b = 0; b < k / fp4_block(format()); b += everywhere ? 1 : 1 + r % 3)
          down.weight.scale_byte(r, b) = static_cast<uint8_t>(scale_byte);
      std::vector<float> values = random.normal(most * k);
      for (int64_t t = 0; t < most; ++t)
        for (int64_t c = 0; c < k; ++c) {
          float& v = values[static_cast<size_t>(t * k + c)];
          v = t % 4 == 0 && c % 2 == 0
                  ? 0
                  : std::ldexp(v, static_cast<int>(t * 8 - 124 + (t % 3 == 0 ? c % 9 : 0)));
        }
      ActBuffer x(DType::kBF16, most, k, values);
      const auto rows = [&](int64_t first, int64_t count) {
        return down.run(ops(), {static_cast<bf16*>(x.view().data) + first * k, DType::kBF16, count, k});
      };
      const auto bits = [](const std::vector<float>& v, int64_t first, int64_t count) {
        return std::span(reinterpret_cast<const uint8_t*>(v.data() + first), static_cast<size_t>(count * 4));
      };
      const std::vector<float> together = rows(0, most);
      for (int64_t t = 0; t < most; ++t) {
        EXPECT_TRUE(same_bytes(bits(rows(t, 1), 0, n), bits(together, t * n, n))) << scale_byte << " " << t;
        const int64_t pair = std::min(t, most - 2);
        EXPECT_TRUE(same_bytes(bits(rows(pair, 2), 0, 2 * n), bits(together, pair * n, 2 * n)))
            << scale_byte << " " << pair;
      }
    }
  }
}

// Some scales are far from 1, including a scale of a zero block. Kernels can have a separate path for such
// panels.
TEST_P(ExpertGemmTest, PanelsOfExtremeScalesAreWithinBudgetAndKeepTheirBitsBesideOthers) {
  const int64_t k = 288, n = 48, block = fp4_block(format()), panel_bytes = ops().panel_bytes(format(), k);
  Random random(13);
  DownCase c(format(), n, k, random);
  const uint8_t largest = format() == Fp4Format::kMxfp4 ? 200 : 126;
  c.weight.scale_byte(3, 1) = 0;  // a block of zeros
  for (int64_t col = block; col < 2 * block; col += 2) c.weight.code_byte(3, col) = 0x80;
  c.weight.scale_byte(17, 2) = 0;
  c.weight.scale_byte(18, 3) = 1;
  c.weight.scale_byte(40, 4) = largest;
  ActBuffer x(DType::kBF16, 40, k, random.normal(40 * k));
  const Fp4MatrixView w = c.weight.view();
  const Buffer panels = pack_groups(ops(), nullptr, w);
  for (int64_t rows : {1, 3, 16, 17, 40}) {
    ActRows some = x.view();
    some.rows = rows;
    const std::vector<double> values = to_double(x.values());
    std::vector<float> expected, budget, together = c.run(ops(), some), alone(together.size());
    c.expect({values.begin(), values.begin() + rows * k}, expected, budget);
    EXPECT_TRUE(within_budget(together, expected, budget)) << rows;
    for (int64_t p = 0; p < n / kPanelRows; ++p)
      ops().down(
          {.gemm = {w.format, some, panels.data() + p * panel_bytes, c.bias.data() + p * kPanelRows, 1, n},
           .scale = w.tensor_scale,
           .out = alone.data() + p * kPanelRows});
    EXPECT_EQ(together, alone) << rows;
  }
}

TEST_P(ExpertGemmTest, NanStaysInItsRow) {
  const int64_t k = 96, n = 16;
  for (const Activation& act : {kSwigluOai, kSilu, kRelu2}) {
    Random random(9);
    const GateUpCase c(format(), n, k, act, random);
    std::vector<float> values = random.normal(21 * k);
    for (int64_t t : {4, 20}) values[static_cast<size_t>(t * k + 17)] = NAN;
    ActBuffer x(DType::kBF16, 21, k, values);
    for (int64_t rows : {9, 21}) {
      ActRows some = x.view();
      some.rows = rows;
      const std::vector<float> out = c.run(ops(), some);
      for (size_t i = 0; i < out.size(); ++i)
        EXPECT_EQ(std::isnan(out[i]), i / n == 4 || i / n == 20) << i << " of " << rows << " rows";
    }
  }
}

TEST(ExpertTables, EveryInstructionSetIsTested) {
  if (!isa_available(Isa::kAmx))
    GTEST_SKIP() << "the best ISA here is " << isa_name(best_isa())
                 << "; tables of higher ISAs are not tested";
  EXPECT_STREQ(expert_tables().back()->name, "cpu_amx");
}

TEST_P(ExpertGemmTest, RouterLogitsAreWithinBudget) {
  for (int64_t h : {1, 2, 3, 5, 64, 2880}) {
    Random random(static_cast<uint64_t>(h));
    const int64_t tokens = 9, stride = 32;
    const std::vector<float> x = random.normal(tokens * h), bias = random.normal(16);
    const std::vector<bf16> panel = to_bf16(random.normal(h * 16));
    std::vector<float> out(static_cast<size_t>(tokens * stride), 42.0f);
    ops().router_logits({x.data(), panel.data(), bias.data(), out.data() + 16, tokens, h, stride});
    std::vector<float> actual, expected, budget;
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(out[static_cast<size_t>(t * stride + 15)], 42.0f);
      for (int64_t r = 0; r < 16; ++r) {
        double sum = bias[static_cast<size_t>(r)], magnitude = std::abs(sum);
        for (int64_t i = 0; i < h; ++i) {
          const double term = static_cast<double>(x[static_cast<size_t>(t * h + i)]) *
                              bf16_to_float(panel[static_cast<size_t>(i * 16 + r)]);
          sum += term;
          magnitude += std::abs(term);
        }
        actual.push_back(out[static_cast<size_t>(t * stride + 16 + r)]);
        expected.push_back(static_cast<float>(sum));
        // Roundings per term: its product, at most h / 4 + 1 additions in its partial sum, and three final
        // additions.
        budget.push_back(static_cast<float>((static_cast<double>(h) / 4 + 6) * kF32Eps * magnitude));
      }
    }
    EXPECT_TRUE(within_budget(actual, expected, budget)) << "H=" << h;
  }
}

}  // namespace
}  // namespace fp4moe
