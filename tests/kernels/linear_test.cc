#include <cmath>
#include <cstring>
#include <tuple>

#include "base/buffer.h"
#include "formats/q8.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Shape {
  int64_t t, n, k;
};

DenseQuant quant_of(const DenseOps& ops) {
  return ops.linear_layout == LinearLayout::kPanel16Q8 ? DenseQuant::kQ8 : DenseQuant::kNone;
}

// Returns `weight` [N, K] after a round trip through 8-bit blocks.
std::vector<float> through_q8(const std::vector<float>& weight, int64_t k) {
  const std::vector<bf16> rounded = to_bf16(weight);
  std::vector<float> values;
  for (int64_t row = 0; row < std::ssize(weight); row += k)
    for (int64_t first = 0; first < k; first += kQ8Block) {
      const int64_t count = std::min(kQ8Block, k - first);
      const Q8Block block = quantize_q8(rounded.data() + row + first, count);
      for (int64_t i = 0; i < count; ++i) values.push_back(block.codes[i] * bf16_to_float(block.scale));
    }
  return values;
}

struct LinearCase {
  Shape shape;
  DType dtype;
  std::vector<float> x, weight, bias, residual;

  LinearCase(Shape s, DType d, uint64_t seed) : shape(s), dtype(d) {
    Random random(seed);
    x = random.normal(s.t * s.k);
    weight = random.normal(s.n * s.k);
    bias = random.normal(s.n);
    residual = random.normal(s.t * s.n);
  }

  // Runs rows [first, first + rows) of the batch through one table; by default all rows.
  std::vector<float> run(const DenseOps& ops, ThreadPool& pool, bool with_bias, bool accumulate,
                         int64_t first = 0, int64_t rows = -1) const {
    if (rows < 0) rows = shape.t;
    const std::vector<bf16> row_major = to_bf16(weight);
    Buffer packed = *Buffer::make(linear_weight_bytes(shape.n, shape.k, ops.linear_layout));
    pack_linear_weight(row_major.data(), shape.n, shape.k, ops.linear_layout, packed.data(), pool);
    ActBuffer act(dtype, rows, shape.k, {x.begin() + first * shape.k, x.begin() + (first + rows) * shape.k});
    std::vector<float> out(residual.begin() + first * shape.n, residual.begin() + (first + rows) * shape.n);
    ops.linear({.x = act.view(),
                .weight = packed.data(),
                .bias = with_bias ? bias.data() : nullptr,
                .out = out.data(),
                .n = shape.n,
                .accumulate = accumulate},
               pool);
    return out;
  }

  // Error bound of an f32 sum of k exact or once-rounded products in any order: (k + 2) eps sum |x w|. Bias
  // and residual add two additions, and Q8 weights add one per block. Products below the smallest normal
  // number can vanish.
  std::vector<float> budget(DenseQuant quant) const {
    const std::vector<float> w = quant == DenseQuant::kQ8 ? through_q8(weight, shape.k) : weight;
    const int64_t additions = shape.k + 4 + (quant == DenseQuant::kQ8 ? q8_blocks(shape.k) : 0);
    std::vector<float> limits;
    for (int64_t t = 0; t < shape.t; ++t)
      for (int64_t n = 0; n < shape.n; ++n) {
        double sum = std::abs(bias[n]) + std::abs(residual[t * shape.n + n]);
        for (int64_t k = 0; k < shape.k; ++k) sum += std::abs(x[t * shape.k + k] * w[n * shape.k + k]) * 1.02;
        limits.push_back(static_cast<float>(static_cast<double>(additions) * kF32Eps * sum));
      }
    return limits;
  }
};

class Linear : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {
 protected:
  const DenseOps& ops() const { return *std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  ThreadPool pool_{2};

  void expect_matches_ref(Shape shape) {
    const LinearCase c(shape, dtype(), 7);
    for (bool bias : {false, true})
      for (bool accumulate : {false, true})
        ASSERT_TRUE(within_budget(c.run(ops(), pool_, bias, accumulate),
                                  c.run(ref_dense_ops(quant_of(ops())), pool_, bias, accumulate),
                                  c.budget(quant_of(ops()))))
            << "T=" << shape.t << " N=" << shape.n << " K=" << shape.k << " bias=" << bias
            << " accumulate=" << accumulate;
  }
};

TEST_P(Linear, EveryNumberOfRows) {
  for (int64_t t = 0; t <= 17; ++t) expect_matches_ref({t, 35, 33});
}

TEST_P(Linear, EveryNumberOfOutputs) {
  for (int64_t n = 1; n <= 40; ++n) expect_matches_ref({3, n, 18});
  for (int64_t n = 60; n <= 180; n += 17) expect_matches_ref({14, n, 18});
}

TEST_P(Linear, EveryDepth) {
  for (int64_t k = 1; k <= 70; ++k) expect_matches_ref({5, 17, k});
}

TEST_P(Linear, LongSums) { expect_matches_ref({13, 48, 2881}); }

TEST_P(Linear, MoreRowsThanOneChunk) { expect_matches_ref({500, 80, 20}); }

// A row's bits depend neither on its batch nor on the number of threads.
TEST_P(Linear, IsBatchInvariant) {
  const LinearCase c({300, 150, 131}, dtype(), 11);
  const std::vector<float> whole = c.run(ops(), pool_, true, true);
  for (auto [first, rows] :
       {std::pair<int64_t, int64_t>{0, 1}, {17, 1}, {299, 1}, {5, 3}, {8, 5}, {30, 12}, {41, 29}, {3, 250}}) {
    const std::vector<float> part = c.run(ops(), pool_, true, true, first, rows);
    ASSERT_EQ(0, std::memcmp(part.data(), whole.data() + first * c.shape.n, part.size() * sizeof(float)))
        << rows << " rows from " << first;
  }
  for (int threads : {1, 3, 7}) {
    ThreadPool other(threads);
    ASSERT_EQ(whole, c.run(ops(), other, true, true)) << threads << " threads";
  }
}

// Every number of rows handles subnormal products, sums and x the same way.
TEST_P(Linear, IsBatchInvariantNearTheSmallestNumbers) {
  LinearCase c({40, 70, 99}, dtype(), 17);
  Random random(19);
  for (float& x : c.x) x = std::ldexp(x, static_cast<int>(random.integer(-132, -118)));
  const std::vector<float> whole = c.run(ops(), pool_, false, false);
  for (const int64_t rows : {1, 2, 3, 4, 5, 17}) {
    const std::vector<float> part = c.run(ops(), pool_, false, false, 7, rows);
    ASSERT_EQ(0, std::memcmp(part.data(), whole.data() + 7 * c.shape.n, part.size() * sizeof(float))) << rows;
  }
}

// Weights that 8 bits represent exactly give the sums of the bf16 weights; the expected values do not depend
// on the quantiser.
TEST_P(Linear, WholeMultiplesOfAPowerOfTwoAreExact) {
  for (const int64_t k : {1, 31, 32, 33, 64, 100}) {
    LinearCase c({5, 37, k}, dtype(), 3);
    Random random(5);
    for (int64_t i = 0; i < std::ssize(c.weight); ++i) {
      const int exponent = static_cast<int>(random.integer(-20, 20));
      const int64_t code = i % k % kQ8Block == 0 ? 127 : random.integer(-127, 127);
      // One scale per block: the exponent of its first element.
      const int64_t first = i - i % k % kQ8Block;
      c.weight[i] = first == i ? std::ldexp(127.0f, exponent)
                               : std::ldexp(static_cast<float>(code), std::ilogb(c.weight[first]) - 6);
    }
    ASSERT_EQ(through_q8(c.weight, k), c.weight);
    ASSERT_TRUE(within_budget(c.run(ops(), pool_, true, true), c.run(ref_dense_ops(), pool_, true, true),
                              c.budget(quant_of(ops()))))
        << "K=" << k;
  }
}

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = cpu_tables();
  for (const DenseOps* ops : cpu_tables(DenseQuant::kQ8)) tables.push_back(ops);
  return tables;
}

INSTANTIATE_TEST_SUITE_P(Tables, Linear,
                         testing::Combine(testing::ValuesIn(all_tables()),
                                          testing::Values(DType::kBF16, DType::kF32)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)->name) + "_" +
                                  dtype_name(std::get<1>(p.param));
                         });

}  // namespace
}  // namespace fp4moe
