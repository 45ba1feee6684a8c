// FP8 weights of DenseOps::linear in every table, against sums written here from the format's definition.
#include <cmath>
#include <cstring>
#include <tuple>

#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Shape {
  int64_t t, n, k, row_block, col_block;
};

// E4M3: bias 7, three fraction bits, subnormals in units of 2^-9.
double value_of(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code < 128 ? magnitude : -magnitude;
}

struct Fp8Case {
  Shape s;
  DType dtype;
  int64_t scales_per_row;
  std::vector<float> x, scales, bias, residual;
  std::vector<uint8_t> codes;

  Fp8Case(Shape shape, DType d, uint64_t seed) : s(shape), dtype(d) {
    Random random(seed);
    scales_per_row = (s.k + s.col_block - 1) / s.col_block;
    x = to_float(to_bf16(random.normal(s.t * s.k)));
    for (int64_t i = 0; i < s.n * s.k; ++i)
      codes.push_back(static_cast<uint8_t>(random.integer(0, 126) + 128 * random.integer(0, 1)));
    for (int64_t i = 0; i < (s.n + s.row_block - 1) / s.row_block * scales_per_row; ++i)
      scales.push_back(std::exp2(static_cast<float>(random.integer(-900, 100)) / 100));
    bias = random.normal(s.n);
    residual = random.normal(s.t * s.n);
  }

  // The values of row n.
  std::vector<double> weights(int64_t n) const {
    std::vector<double> values;
    for (int64_t k = 0; k < s.k; ++k)
      values.push_back(value_of(codes[static_cast<size_t>(n * s.k + k)]) *
                       static_cast<double>(
                           scales[static_cast<size_t>(n / s.row_block * scales_per_row + k / s.col_block)]));
    return values;
  }

  std::vector<float> run(const DenseOps& ops, ThreadPool& pool, bool adds, int64_t first = 0,
                         int64_t rows = -1) const {
    if (rows < 0) rows = s.t;
    const Fp8Source source = [&](Buffer&) -> Result<Fp8LinearView> {
      return Fp8LinearView{codes.data(), scales.data(), s.row_block, s.col_block};
    };
    const Fp8Shape shape{s.n, s.k, s.row_block, s.col_block};
    const Result<Fp8Weight> weight = put_fp8_weight(source, shape, ops, pool);
    EXPECT_TRUE(weight.ok()) << weight.status().message();
    EXPECT_EQ(weight->storage.num_bytes(), fp8_weight_bytes(shape, ops.fp8_layout));
    ActBuffer act(dtype, rows, s.k, {x.begin() + first * s.k, x.begin() + (first + rows) * s.k});
    std::vector<float> out(residual.begin() + first * s.n, residual.begin() + (first + rows) * s.n);
    ops.linear({.x = act.view(),
                .bias = adds ? bias.data() : nullptr,
                .out = out.data(),
                .n = s.n,
                .accumulate = adds,
                .format = LinearFormat::kFp8,
                .fp8 = weight->view},
               pool);
    return out;
  }

  // The sums in double, and the error bound of f32 sums in any order: one rounding for each of k products and
  // additions, and two for each scale.
  void expect(const std::vector<float>& found, bool adds) const {
    std::vector<float> sums(found.size()), limits(found.size());
    for (int64_t n = 0; n < s.n; ++n) {
      const std::vector<double> w = weights(n);
      for (int64_t t = 0; t < s.t; ++t) {
        const auto at = static_cast<size_t>(t * s.n + n);
        double sum = 0, magnitude = 0;
        const auto term = [&](double v) { sum += v, magnitude += std::abs(v); };
        if (adds) term(bias[static_cast<size_t>(n)]), term(residual[at]);
        for (int64_t k = 0; k < s.k; ++k)
          term(static_cast<double>(x[static_cast<size_t>(t * s.k + k)]) * w[static_cast<size_t>(k)]);
        sums[at] = static_cast<float>(sum);
        limits[at] = static_cast<float>(static_cast<double>(s.k + s.k / 16 + 6) * kF32Eps * magnitude);
      }
    }
    ASSERT_TRUE(within_budget(found, sums, limits))
        << "T=" << s.t << " N=" << s.n << " K=" << s.k << " blocks " << s.row_block << " x " << s.col_block;
  }
};

class LinearFp8 : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {
 protected:
  const DenseOps& ops() const { return *std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  ThreadPool pool_{2};

  void expect_sums(Shape shape) {
    const Fp8Case c(shape, dtype(), 7);
    for (const bool adds : {false, true}) c.expect(c.run(ops(), pool_, adds), adds);
  }
};

// A single product with scale 1 is exact.
TEST_P(LinearFp8, EveryCodeIsExact) {
  Fp8Case c({1, 254, 1, 254, 1}, dtype(), 3);
  c.x = {1.5f};
  c.scales = {1};
  std::vector<float> expected;
  for (int i = 0; i < 254; ++i) {
    const auto code = static_cast<uint8_t>(i < 127 ? i : i + 1);
    c.codes[static_cast<size_t>(i)] = code;
    expected.push_back(static_cast<float>(1.5 * value_of(code)));
  }
  EXPECT_EQ(c.run(ops(), pool_, false), expected);
}

TEST_P(LinearFp8, EveryNumberOfRows) {
  for (int64_t t = 0; t <= 35; ++t) expect_sums({t, 35, 161, 16, 128});
}

TEST_P(LinearFp8, EveryNumberOfOutputs) {
  for (int64_t n = 1; n <= 40; ++n) expect_sums({3, n, 66, 1, 32});
  for (int64_t n = 100; n <= 300; n += 29) expect_sums({14, n, 66, 128, 128});
}

TEST_P(LinearFp8, EveryDepth) {
  for (int64_t k = 1; k <= 140; ++k) expect_sums({5, 17, k, 8, 128});
}

TEST_P(LinearFp8, EveryGranularity) {
  for (const int64_t row_block : {1, 3, 16, 64, 128, 150})
    for (const int64_t col_block : {32, 64, 96, 128, 160, 300, 301, 1024})
      if (col_block % 32 == 0 || col_block >= 300) expect_sums({6, 150, 300, row_block, col_block});
}

TEST_P(LinearFp8, LongSums) {
  expect_sums({13, 48, 2881, 128, 128});
  expect_sums({130, 16, 7168, 16, 7168});
}

// A row's bits depend neither on its batch nor on the number of threads.
TEST_P(LinearFp8, IsBatchInvariant) {
  for (const int64_t col_block : {64, 128, 291}) {
    const Fp8Case c({300, 150, 291, 128, col_block}, dtype(), 11);
    const std::vector<float> whole = c.run(ops(), pool_, true);
    for (auto [first, rows] : {std::pair<int64_t, int64_t>{0, 1},
                               {17, 1},
                               {299, 1},
                               {6, 2},
                               {5, 3},
                               {8, 5},
                               {30, 12},
                               {41, 29},
                               {3, 250}}) {
      const std::vector<float> part = c.run(ops(), pool_, true, first, rows);
      ASSERT_EQ(0, std::memcmp(part.data(), whole.data() + first * c.s.n, part.size() * sizeof(float)))
          << rows << " rows from " << first;
    }
    for (int threads : {1, 3, 7}) {
      ThreadPool other(threads);
      ASSERT_EQ(whole, c.run(ops(), other, true)) << threads << " threads";
    }
  }
}

TEST_P(LinearFp8, NormLinearTakesFp8) {
  const Fp8Case c({4, 35, 96, 1, 96}, DType::kBF16, 13);
  const std::vector<float> ones(96, 1.0f);
  const Fp8Source source = [&](Buffer&) -> Result<Fp8LinearView> {
    return Fp8LinearView{c.codes.data(), c.scales.data(), 1, 96};
  };
  const Result<Fp8Weight> weight = put_fp8_weight(source, {35, 96, 1, 96}, ops(), pool_);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  ActBuffer normed(dtype(), 4, 96), again(dtype(), 4, 96);
  std::vector<float> out(4 * 35), expected(4 * 35);
  const auto linear = [&](ActBuffer& act, std::vector<float>& to) {
    return LinearArgs{
        .x = act.view(), .out = to.data(), .n = 35, .format = LinearFormat::kFp8, .fp8 = weight->view};
  };
  ops().norm_linear({{c.x.data(), ones.data(), 1e-6f, normed.view()}, linear(normed, out)}, pool_);
  ops().rms_norm({c.x.data(), ones.data(), 1e-6f, again.view()}, pool_);
  ops().linear(linear(again, expected), pool_);
  EXPECT_EQ(out, expected);

  std::vector<float> first(4 * 35), second(4 * 35);
  ops().norm_linear(
      {{c.x.data(), ones.data(), 1e-6f, normed.view()}, linear(normed, first), linear(normed, second)},
      pool_);
  EXPECT_EQ(first, expected);
  EXPECT_EQ(second, expected);
}

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = cpu_tables();
  for (const DenseOps* ops : cpu_tables(DenseQuant::kQ8)) tables.push_back(ops);
  tables.push_back(&ref_dense_ops());
  tables.push_back(&ref_dense_ops(DenseQuant::kQ8));
  return tables;
}

INSTANTIATE_TEST_SUITE_P(Tables, LinearFp8,
                         testing::Combine(testing::ValuesIn(all_tables()),
                                          testing::Values(DType::kBF16, DType::kF32)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)->name) + "_" +
                                  dtype_name(std::get<1>(p.param));
                         });

// Codes take one byte, and the scales 1 / 4096 (blocks of 128 x 128, row-major) or 1 / 32 of that (panels).
TEST(Fp8WeightBytes, AreCodesAndScales) {
  const Fp8Shape shape{256, 512, 128, 128};
  EXPECT_EQ(fp8_weight_bytes(shape, LinearLayout::kRowMajorFp8), 256 + 256 * 512);
  EXPECT_EQ(fp8_weight_bytes(shape, LinearLayout::kPanel16Fp8), 256 * 4 * 4 + 256 * 512);
}

}  // namespace
}  // namespace fp4moe
