// Compares the GPU's linear layers with FP8 weights with the oracle: both kernels, every split of T, and
// every granularity of scales.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "device/stream.h"
#include "formats/e4m3.h"
#include "kernels/cuda/dense/linear_fp8.h"
#include "kernels/cuda/device_array.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Fp8Case {
  int64_t t, n, k;
  int64_t row_block = 1, col_block = 1 << 20;  // of scales
  bool has_bias = true, accumulate = true;
};

// A case's operands. Codes are all values but NaN, so that sums have codes of every magnitude.
struct Operands {
  std::vector<bf16> x;
  std::vector<uint8_t> codes;
  std::vector<float> scales, bias, before;

  explicit Operands(const Fp8Case& c, uint64_t seed = 1) {
    Random random(seed);
    x = to_bf16(random.normal(c.t * c.k));
    for (int64_t i = 0; i < c.n * c.k; ++i)
      codes.push_back(static_cast<uint8_t>(random.integer(0, 126) + 128 * random.integer(0, 1)));
    const int64_t count = (c.n + c.row_block - 1) / c.row_block * ((c.k + c.col_block - 1) / c.col_block);
    for (int64_t i = 0; i < count; ++i)
      scales.push_back(std::exp2(static_cast<float>(random.integer(-1200, -400)) / 100));
    bias = random.normal(c.n);
    before = random.normal(c.t * c.n);
  }
  Fp8LinearView view(const Fp8Case& c) const {
    return {codes.data(), scales.data(), c.row_block, std::min(c.col_block, c.k)};
  }
};

class LinearFp8Cuda : public testing::Test {
 protected:
  void SetUp() override {
    const Status prepared = prepare_cuda_dense_ops();
    ASSERT_TRUE(prepared.ok()) << prepared.message();
  }
  Fp8Weight put(const Fp8Case& c, const Operands& o, const DenseOps& ops) {
    const Fp8LinearView view = o.view(c);
    return put_fp8_weight([&](Buffer&) -> Result<Fp8LinearView> { return view; },
                          {c.n, c.k, view.row_block, view.col_block}, ops, pool_)
        .value();
  }
  std::vector<float> run(const Fp8Case& c, const Operands& o, const DenseOps& ops) {
    const Fp8Weight weight = put(c, o, ops);
    const DeviceArray<bf16> x(o.x);
    const DeviceArray<float> bias(o.bias), out(o.before);
    ops.linear({.x = {x.data(), DType::kBF16, c.t, c.k},
                .bias = c.has_bias ? bias.data() : nullptr,
                .out = out.data(),
                .n = c.n,
                .accumulate = c.accumulate,
                .format = LinearFormat::kFp8,
                .fp8 = weight.view},
               pool_);
    const Status status = current_stream().synchronize();
    EXPECT_TRUE(status.ok()) << status.message();
    return out.values();
  }
  std::vector<float> expected(const Fp8Case& c, Operands o) {
    ref_dense_ops().linear({.x = {o.x.data(), DType::kBF16, c.t, c.k},
                            .bias = c.has_bias ? o.bias.data() : nullptr,
                            .out = o.before.data(),
                            .n = c.n,
                            .accumulate = c.accumulate,
                            .format = LinearFormat::kFp8,
                            .fp8 = o.view(c)},
                           pool_);
    return o.before;
  }
  // f32 sums in any order: below K eps times the sum of the products' magnitudes, plus the rounding of
  // scales.
  std::vector<float> budget(const Fp8Case& c, const Operands& o) {
    Operands magnitudes = o;
    for (bf16& v : magnitudes.x) v.bits &= 0x7fff;
    for (uint8_t& v : magnitudes.codes) v &= 0x7f;
    for (float& v : magnitudes.bias) v = std::abs(v);
    for (float& v : magnitudes.before) v = std::abs(v);
    std::vector<float> sums = expected(c, magnitudes);
    for (float& v : sums) v = static_cast<float>(v * kF32Eps * (static_cast<double>(c.k) + 16));
    return sums;
  }
  void check(const Fp8Case& c) {
    const Operands o(c);
    const std::vector<float> want = expected(c, o), limits = budget(c, o);
    for (const DenseOps* ops : {cuda_dense_ops(), cuda_invariant_dense_ops()}) {
      EXPECT_TRUE(within_budget(run(c, o, *ops), want, limits))
          << ops->name << " T=" << c.t << " N=" << c.n << " K=" << c.k << " blocks " << c.row_block << " x "
          << c.col_block;
    }
  }

  ThreadPool pool_{2};
  Stream stream_ = std::move(Stream::make()).value();
  StreamScope scope_{stream_};
};

constexpr Fp8Case with_blocks(Fp8Case c, int64_t rows, int64_t cols) {
  c.row_block = rows, c.col_block = cols;
  return c;
}

TEST_F(LinearFp8Cuda, EveryNumberOfFewTokens) {
  for (int64_t t = 0; t <= 18; ++t) check({t, 300, 96, 1, 1 << 20, t % 2 == 0, t % 3 == 0});
}
TEST_F(LinearFp8Cuda, EverySplitOfTokens) {
  for (int64_t t : {16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 257}) {
    check({t, 131, 288, 1, 1 << 20, t % 2 == 0, t % 3 == 0});
    check(with_blocks({t, 131, 288, 0, 0, t % 2 == 0, t % 3 == 0}, 128, 128));
  }
}
TEST_F(LinearFp8Cuda, EveryNumberOfOutputs) {
  for (int64_t n : {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 131, 1055, 1057, 5281})
    for (int64_t t : {3, 20}) check({t, n, 64});
}
TEST_F(LinearFp8Cuda, EveryDepth) {
  for (int64_t k : {16,  32,   48,   64,   96,   112,  128,  144,  224,  256, 272,
                    288, 1504, 1536, 1568, 2880, 3072, 3104, 4096, 7168, 9216})
    for (int64_t t : {5, 16, 40}) check({t, 150, k}), check(with_blocks({t, 150, k}, 128, 128));
}
TEST_F(LinearFp8Cuda, EveryGranularityOfScales) {
  for (int64_t t : {1, 8, 13, 40, 100})
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1 << 20, 1 << 20},
                                     {1, 1 << 20},
                                     {128, 128},
                                     {1, 128},
                                     {48, 32},
                                     {3, 64},
                                     {7, 96},
                                     {128, 160},
                                     {64, 256}})
      check(with_blocks({t, 301, 416}, std::min<int64_t>(rows, 301), cols));
}
TEST_F(LinearFp8Cuda, ModelShapes) {
  for (int64_t t : {1, 4, 16, 64}) check({t, 5120, 2880}), check({t, 2880, 4096});
}

// A single product with scale 1 is exact, in either kernel.
TEST_F(LinearFp8Cuda, EveryCodeIsExact) {
  for (int64_t k : {16, 32}) {
    const Fp8Case c{2, 254, k, 1, 1 << 20, false, false};
    Operands o(c);
    std::vector<float> want;
    for (bf16& v : o.x) v = {};
    o.x[3] = o.x[static_cast<size_t>(k + 3)] = float_to_bf16(1.5f);
    for (int i = 0; i < 254; ++i) {
      const auto code = static_cast<uint8_t>(i < 127 ? i : i + 1);
      o.codes[static_cast<size_t>(i * k + 3)] = code;
      o.scales[static_cast<size_t>(i)] = 1;
      want.push_back(1.5f * e4m3_decode(code));
    }
    want.insert(want.end(), want.begin(), want.begin() + 254);
    EXPECT_EQ(run(c, o, *cuda_dense_ops()), want);
    EXPECT_EQ(run(c, o, *cuda_invariant_dense_ops()), want);
  }
}

TEST_F(LinearFp8Cuda, GivesTheSameBitsAlways) {
  for (int64_t t : {1, 16, 40, 130}) {
    const Fp8Case c{t, 1000, 2880};
    const Operands o(c);
    EXPECT_EQ(run(c, o, *cuda_dense_ops()), run(c, o, *cuda_dense_ops()));
  }
}

// Batch-invariant table: a token gives the same bits alone and as the last of any number of tokens, and an
// output gives the same bits among fewer outputs.
TEST_F(LinearFp8Cuda, BitsDependNeitherOnTokensNorOnOutputs) {
  const DenseOps& ops = *cuda_invariant_dense_ops();
  for (const int64_t col_block : {1 << 20, 128}) {
    const Fp8Case all = with_blocks({600, 700, 1440}, 1, col_block);
    const Operands o(all);
    const std::vector<float> whole = run(all, o, ops);
    for (const int64_t t : {1, 7, 16, 17, 64, 130, 599}) {
      for (const int64_t n : {700, 130}) {
        Fp8Case c = all;
        c.t = t, c.n = n;
        Operands part = o;
        part.before.clear();
        for (int64_t i = 0; i < t; ++i)
          part.before.insert(part.before.end(), o.before.begin() + i * 700, o.before.begin() + i * 700 + n);
        const std::vector<float> found = run(c, part, ops);
        for (int64_t i = 0; i < t; ++i)
          ASSERT_TRUE(std::equal(found.begin() + i * n, found.begin() + (i + 1) * n, whole.begin() + i * 700))
              << "T=" << t << " N=" << n << " token " << i << " col_block " << col_block;
      }
    }
  }
}

TEST_F(LinearFp8Cuda, NanStaysWithItsToken) {
  for (int64_t t : {6, 40}) {
    const Fp8Case c{t, 200, 128};
    Operands o(c);
    o.x[2 * 128 + 5] = float_to_bf16(std::nanf(""));
    const std::vector<float> values = run(c, o, *cuda_dense_ops());
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(std::isnan(values[i]), i / 200 == 2) << i;
  }
}

TEST_F(LinearFp8Cuda, NormLinearIsNormThenLinear) {
  for (const int64_t col_block : {1 << 20, 128})
    for (int64_t t : {0, 1, 2, 4, 5, 17})
      for (int64_t k : {32, 1056, 2880, 5120}) {
        const Fp8Case c = with_blocks({t, 333, k, 1, 1, true, false}, 1, col_block);
        const Operands o(c);
        Random random(3);
        const std::vector<float> residual = random.normal(t * k, 5), weight = random.normal(k);
        std::vector<float> normed(residual.size()), want(static_cast<size_t>(t * c.n));
        ref_dense_ops().norm_linear(
            {.norm = {residual.data(), weight.data(), 1e-5f, {normed.data(), DType::kF32, t, k}, nullptr},
             .linear = {.x = {normed.data(), DType::kF32, t, k},
                        .bias = o.bias.data(),
                        .out = want.data(),
                        .n = c.n,
                        .format = LinearFormat::kFp8,
                        .fp8 = o.view(c)}},
            pool_);
        const DenseOps& ops = *cuda_dense_ops();
        const Fp8Weight matrix = put(c, o, ops);
        const DeviceArray<float> device_x(residual), device_weight(weight), bias(o.bias), out(t * c.n);
        const DeviceArray<bf16> scratch(t * k);
        ops.norm_linear({.norm = {device_x.data(),
                                  device_weight.data(),
                                  1e-5f,
                                  {scratch.data(), DType::kBF16, t, k},
                                  nullptr},
                         .linear = {.x = {scratch.data(), DType::kBF16, t, k},
                                    .bias = bias.data(),
                                    .out = out.data(),
                                    .n = c.n,
                                    .format = LinearFormat::kFp8,
                                    .fp8 = matrix.view}},
                        pool_);
        ASSERT_TRUE(current_stream().synchronize().ok());
        if (t > 0) {
          EXPECT_TRUE(within_relative_l2(out.values(), want, 0.7 * kBf16Eps)) << t << " x " << k;
        }
      }
}

// Two layers on the same normed rows, in one launch or two, give the bits that each gives alone.
TEST_F(LinearFp8Cuda, NormLinearTakesASecondLayer) {
  const DenseOps& ops = *cuda_dense_ops();
  for (const int64_t col_block : {1 << 20, 128})
    for (const int64_t t : {0, 1, 3, 4, 5, 9})
      for (const auto& [n, second_n, k] : {std::array<int64_t, 3>{12288, 64, 2048},
                                           {1000, 1, 96},
                                           {333, 300, 2880},
                                           {90, 8, 1056},
                                           {256, 700, 64}}) {
        const Fp8Case c = with_blocks({t, n, k, 1, 1, true, false}, 1, col_block);
        const Operands o(c);
        Random random(3);
        const Fp8Weight matrix = put(c, o, ops);
        const DeviceArray<float> x(random.normal(t * k, 5)), weight(random.normal(k)), bias(o.bias);
        const DeviceArray<bf16> second_weight(to_bf16(random.normal(second_n * k))), scratch(t * k);
        const RmsNormArgs norm{x.data(), weight.data(), 1e-5f, {scratch.data(), DType::kBF16, t, k}, nullptr};
        const auto first_of = [&](const DeviceArray<float>& out) {
          return LinearArgs{.x = norm.out_act,
                            .bias = bias.data(),
                            .out = out.data(),
                            .n = n,
                            .format = LinearFormat::kFp8,
                            .fp8 = matrix.view};
        };
        const auto second_of = [&](const DeviceArray<float>& out) {
          return LinearArgs{
              .x = norm.out_act, .weight = second_weight.data(), .out = out.data(), .n = second_n};
        };
        const DeviceArray<float> first(t * n), second(t * second_n), alone(t * n), second_alone(t * second_n);
        ops.norm_linear({norm, first_of(first), second_of(second)}, pool_);
        ops.norm_linear({norm, first_of(alone)}, pool_);
        ops.norm_linear({norm, second_of(second_alone)}, pool_);
        ASSERT_TRUE(current_stream().synchronize().ok());
        EXPECT_EQ(first.values(), alone.values()) << t << " x " << k << ", N=" << n;
        EXPECT_EQ(second.values(), second_alone.values()) << t << " x " << k << ", N=" << second_n;
      }
}

TEST_F(LinearFp8Cuda, RefusesRowsThatAreNotAligned) {
  const Fp8Case c{1, 3, kFp8DeviceStep + 8};
  const Operands o(c);
  const Fp8LinearView view = o.view(c);
  const Result<Fp8Weight> weight =
      put_fp8_weight([&](Buffer&) -> Result<Fp8LinearView> { return view; },
                     {c.n, c.k, view.row_block, view.col_block}, *cuda_dense_ops(), pool_);
  ASSERT_FALSE(weight.ok());
  EXPECT_EQ(weight.status().message(),
            "an FP8 weight of 24 columns is not supported by 'cuda'; legal: a multiple of 16 columns");
}

}  // namespace
}  // namespace fp4moe
