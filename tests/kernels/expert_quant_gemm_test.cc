// Compares the expert GEMMs of every table on quantised activations (w4a4 and w4a8) with sums in double over
// the quantised values, and w4a8 also with integer sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/e8m0.h"
#include "formats/nvfp4.h"
#include "kernels/act_quant.h"
#include "kernels/expert_gemm_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

enum class Scheme { kStatic, kPerToken, kInt8 };

// Rows quantised by quantize_act(), the GemmCall that applies their scales, and their values in double.
struct QuantRows {
  QuantRows(Scheme scheme, Fp4Format format, const std::vector<float>& values, int64_t k)
      : codes(DType::kBF16, static_cast<int64_t>(values.size()) / k, k), bytes(values.size()) {
    const int64_t num_rows = codes.view().rows, block = fp4_block(format);
    ActBuffer plain(DType::kF32, num_rows, k, values);
    row_scales.assign(static_cast<size_t>(num_rows), 1);
    block_scales.assign(static_cast<size_t>(num_rows * k / block), 1);
    block_starts.resize(block_scales.size());
    ActQuantArgs args = {.kind = scheme == Scheme::kStatic     ? ActQuantKind::kNvfp4Static
                                 : scheme == Scheme::kPerToken ? ActQuantKind::kNvfp4PerToken
                                                               : ActQuantKind::kInt8Block,
                         .x = plain.view(),
                         .block = static_cast<int>(block),
                         .scale = {2688.0f / 5.3f},
                         .out = codes.view(),
                         .row_scales = row_scales.data(),
                         .block_scales = block_scales.data(),
                         .block_starts = block_starts.data()};
    quantize_act(args);
    if (scheme == Scheme::kInt8) {  // the GEMM reads the same codes, stored as bytes
      args.out = {bytes.data(), DType::kI8, num_rows, k};
      quantize_act(args);
      call.block_scales = block_scales.data();
      call.block_starts = block_starts.data();
    }
    rows = args.out;
    if (scheme == Scheme::kStatic) call.tensor_scale = to_decode(args.scale).value;
    if (scheme == Scheme::kPerToken) call.row_scales = row_scales.data();
    const std::vector<float> code_values = codes.values();
    for (size_t i = 0; i < code_values.size(); ++i)
      exact.push_back(static_cast<double>(code_values[i]) * call.tensor_scale *
                      row_scales[i / static_cast<size_t>(k)] * block_scales[i / static_cast<size_t>(block)]);
  }

  ActRows first(int64_t count) const { return part(0, count); }
  ActRows part(int64_t first_row, int64_t count) const {
    const int64_t row_bytes = rows.cols * (rows.dtype == DType::kI8 ? 1 : 2);
    return {static_cast<uint8_t*>(rows.data) + first_row * row_bytes, rows.dtype, count, rows.cols};
  }

  ActBuffer codes;
  std::vector<int8_t> bytes;
  ActRows rows;
  std::vector<float> row_scales, block_scales;
  std::vector<int32_t> block_starts;
  GemmCall call;
  std::vector<double> exact;
};

class ExpertQuantGemm : public testing::TestWithParam<std::tuple<const ExpertOps*, Fp4Format>> {
 protected:
  const ExpertOps& ops() const { return *std::get<0>(GetParam()); }
  Fp4Format format() const { return std::get<1>(GetParam()); }
  std::vector<Scheme> schemes() const {
    return format() == Fp4Format::kMxfp4
               ? std::vector<Scheme>{Scheme::kInt8}
               : std::vector<Scheme>{Scheme::kStatic, Scheme::kPerToken, Scheme::kInt8};
  }
  std::vector<int64_t> widths() const {
    return format() == Fp4Format::kMxfp4 ? std::vector<int64_t>{32, 96, 2880}
                                         : std::vector<int64_t>{16, 48, 2880};
  }
};

const auto kTablesAndFormats = testing::Combine(testing::ValuesIn(expert_tables()),
                                                testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4));
std::string table_and_format(const testing::TestParamInfo<std::tuple<const ExpertOps*, Fp4Format>>& p) {
  return std::string(std::get<0>(p.param)->name) + "_" + fp4_format_name(std::get<1>(p.param));
}
INSTANTIATE_TEST_SUITE_P(Tables, ExpertQuantGemm, kTablesAndFormats, table_and_format);

TEST_P(ExpertQuantGemm, DownIsWithinBudgetForEveryNumberOfRows) {
  for (Scheme scheme : schemes())
    for (int64_t k : widths()) {
      Random random(static_cast<uint64_t>(k));
      const DownCase c(format(), 32, k, random);
      QuantRows x(scheme, format(), random.normal(17 * k), k);
      std::vector<float> expected, budget;
      c.expect(x.exact, expected, budget);
      for (int64_t rows = 0; rows <= 17; ++rows) {
        const size_t size = static_cast<size_t>(rows * 32);
        EXPECT_TRUE(within_budget(c.run(ops(), x.first(rows), x.call), {expected.data(), size},
                                  {budget.data(), size}))
            << "scheme " << int(scheme) << " K=" << k << " rows=" << rows;
      }
    }
}

TEST_P(ExpertQuantGemm, GateUpIsWithinBudgetForEveryActivation) {
  for (Scheme scheme : schemes())
    for (const Activation& act : {kSwigluOai, kSwigluOther, kSilu, kRelu2})
      for (DType out_dtype : {DType::kBF16, DType::kF32}) {
        const int64_t h = 192;
        Random random(31);
        const GateUpCase c(format(), 32, h, act, random);
        QuantRows x(scheme, format(), random.normal(13 * h, 4), h);
        x.call.out_dtype = out_dtype;
        std::vector<float> expected, budget;
        c.expect(x.exact, out_dtype, expected, budget);
        for (int64_t rows : {0, 1, 5, 12, 13}) {
          const size_t size = static_cast<size_t>(rows * 32);
          EXPECT_TRUE(within_budget(c.run(ops(), x.first(rows), x.call), {expected.data(), size},
                                    {budget.data(), size}))
              << "scheme " << int(scheme) << " activation " << int(act.kind) << " rows=" << rows;
        }
      }
}

// These inputs must fail the comparison: unquantised rows, missing scales, gate and up in the wrong order,
// and the encode scale instead of the decode scale.
TEST_P(ExpertQuantGemm, WrongInputsFail) {
  for (Scheme scheme : schemes()) {
    const int64_t h = 192;
    Random random(41);
    const GateUpCase c(format(), 32, h, kSilu, random);
    const std::vector<float> values = random.normal(6 * h);
    QuantRows x(scheme, format(), values, h);
    std::vector<float> expected, budget;
    c.expect(x.exact, DType::kBF16, expected, budget);
    const auto passes = [&](const ActRows& rows, const GemmCall& call) {
      return within_budget(c.run(ops(), rows, call), expected, budget);
    };
    ASSERT_TRUE(passes(x.first(6), x.call)) << int(scheme);

    ActBuffer plain(DType::kBF16, 6, h, values);
    EXPECT_FALSE(passes(plain.view(), {})) << int(scheme);
    EXPECT_FALSE(within_relative_l2(c.run(ops(), plain.view(), {}), expected, 3e-3)) << int(scheme);
    const std::vector<float> ones(x.block_scales.size(), 1.0f);
    GemmCall wrong;  // kI8 rows require block scales
    if (scheme == Scheme::kInt8) {
      wrong.block_scales = ones.data();
      wrong.block_starts = x.block_starts.data();
    }
    EXPECT_FALSE(passes(x.first(6), wrong)) << int(scheme);
    wrong = x.call;
    wrong.swapped = true;
    EXPECT_FALSE(passes(x.first(6), wrong)) << int(scheme);
    wrong = x.call;
    wrong.tensor_scale = 1 / wrong.tensor_scale;
    std::vector<float> inverse = scheme == Scheme::kInt8 ? x.block_scales : x.row_scales;
    for (float& s : inverse) s = 1 / s;
    (scheme == Scheme::kInt8 ? wrong.block_scales : wrong.row_scales) = inverse.data();
    EXPECT_FALSE(passes(x.first(6), wrong)) << int(scheme);
  }
}

// Sums each block in int32 with doubled codes, then follows the documented float steps: multiply by the
// activation's block scale, accumulate with an FMA by the weight's block scale in ascending block order,
// multiply by the tensor scale, add the bias.
float integer_dot(const DownCase& c, int64_t row, const float* codes, const float* scales) {
  const Fp4MatrixView w = c.weight.view();
  const int64_t block = fp4_block(w.format);
  float total = 0;
  for (int64_t b = 0; b < w.cols / block; ++b) {
    int32_t sum = 0;
    for (int64_t i = b * block; i < (b + 1) * block; ++i) {
      const uint8_t byte = w.codes[row * w.code_stride_bytes + i / 2];
      const float code = e2m1_decode(i % 2 == 0 ? e2m1_even(byte) : e2m1_odd(byte));
      sum += static_cast<int32_t>(2 * code) * static_cast<int32_t>(codes[i]);
    }
    const uint8_t scale_byte = w.scales[row * w.scale_stride_bytes + b];
    const float scale = w.format == Fp4Format::kMxfp4 ? e8m0_decode(scale_byte) : e4m3_decode(scale_byte);
    total = std::fma(scale, static_cast<float>(sum) * 0.5f * scales[b], total);
  }
  return total * w.tensor_scale + c.bias[static_cast<size_t>(row)];
}

// w4a8 is integer arithmetic, so the results equal int32 sums bit for bit. This holds where FMAs are used
// (AVX2 and AVX-512). The scalar build rounds the product with a block scale, which is exact only for e8m0
// scales in the middle of their range; the oracle sums in double.
class ExpertInt8Gemm : public ExpertQuantGemm {
 protected:
  bool fused() const { return &ops() != &ref_expert_ops() && std::string(ops().name) != "cpu_scalar"; }
  void expect_integer_sums(const DownCase& c, const std::vector<float>& values, int64_t rows) const {
    const Fp4MatrixView w = c.weight.view();
    const QuantRows x(Scheme::kInt8, format(), values, w.cols);
    const std::vector<float> codes = x.codes.values(), out = c.run(ops(), x.first(rows), x.call);
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t r = 0; r < w.rows; ++r) {
        const float expected = integer_dot(c, r, codes.data() + t * w.cols,
                                           x.block_scales.data() + t * (w.cols / fp4_block(format())));
        const float actual = out[static_cast<size_t>(t * w.rows + r)];
        if (std::isnan(actual) && std::isnan(expected)) continue;
        ASSERT_EQ(actual, expected) << "K=" << w.cols << " row " << t << " output " << r;
      }
  }
};

INSTANTIATE_TEST_SUITE_P(Tables, ExpertInt8Gemm, kTablesAndFormats, table_and_format);

TEST_P(ExpertInt8Gemm, SumsAreIntegers) {
  if (!fused() && (&ops() == &ref_expert_ops() || format() == Fp4Format::kNvfp4)) GTEST_SKIP();
  for (int64_t k : {96, 2880})
    for (bool extreme : {false, true}) {
      Random random(51);
      DownCase c(format(), 48, k, random);
      std::vector<float> values = random.normal(130 * k);
      if (extreme) {  // every product is 127 * 6 in magnitude
        for (float& v : values) v = v < 0 ? -1.0f : 1.0f;
        for (int64_t r = 0; r < 48; ++r)
          for (int64_t i = 0; i < k; i += 2) c.weight.code_byte(r, i) = r % 2 == 0 ? 0x77 : 0xf7;
      }
      for (int64_t rows : {1, 4, 7, 8, 12, 17, 130}) expect_integer_sums(c, values, rows);
    }
}

// Covers the whole range of the activation's and the weight's scales.
TEST_P(ExpertInt8Gemm, EveryScale) {
  if (!fused()) GTEST_SKIP();
  const int64_t k = 2 * fp4_block(format());
  Random random(61);
  DownCase c(format(), 16, k, random);
  c.bias.assign(16, 0.0f);
  std::vector<float> values;
  for (int exponent = -120; exponent <= 120; ++exponent)
    for (float v : random.normal(k)) values.push_back(std::ldexp(v, exponent));
  const int last_scale = format() == Fp4Format::kMxfp4 ? 254 : 126;
  for (int scale = 0; scale <= last_scale; scale += scale < 4 ? 1 : 5) {
    for (int64_t r = 0; r < 16; ++r)
      for (int64_t b = 0; b < 2; ++b) c.weight.scale_byte(r, b) = static_cast<uint8_t>(scale);
    expect_integer_sums(c, values, 241);
  }
}

TEST_P(ExpertQuantGemm, ARowGivesTheSameBitsAloneAndInAnyBatch) {
  const int64_t k = 192, n = 32, blocks = k / fp4_block(format());
  for (Scheme scheme : schemes()) {
    Random random(7);
    const DownCase c(format(), n, k, random);
    QuantRows x(scheme, format(), random.normal(30 * k), k);
    const std::vector<float> whole = c.run(ops(), x.first(30), x.call);
    for (int64_t t = 0; t < 30; ++t) {
      GemmCall call = x.call;
      if (call.row_scales != nullptr) call.row_scales += t;
      if (call.block_scales != nullptr) call.block_scales += t * blocks, call.block_starts += t * blocks;
      const std::vector<float> alone = c.run(ops(), x.part(t, 1), call);
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), whole.begin() + t * n)) << t;
    }
  }
}

TEST_P(ExpertQuantGemm, NanOfOneBlockStaysInItsRow) {
  const int64_t k = 96, n = 16;
  Random random(9);
  const DownCase c(format(), n, k, random);
  std::vector<float> values = random.normal(9 * k);
  values[static_cast<size_t>(4 * k + 17)] = NAN;
  const QuantRows x(Scheme::kInt8, format(), values, k);
  const std::vector<float> out = c.run(ops(), x.first(9), x.call);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i / n == 4) << i;
}

}  // namespace
}  // namespace fp4moe
