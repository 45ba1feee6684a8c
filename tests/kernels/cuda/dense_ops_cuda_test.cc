// Compares the GPU's dense ops with the oracle.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/cuda/dense/linear_few.h"
#include "kernels/cuda/dense_ops_on_gpu.h"
#include "kernels/cuda/device_array.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct LinearCase {
  int64_t tokens, n, k;
  bool has_bias = false, accumulate = false;
};

class LinearCuda : public DenseOpsCuda {
 protected:
  // Returns the GPU's output for `c` after comparing it with the oracle's.
  std::vector<float> run(const LinearCase& c, uint64_t seed = 1) {
    Random random(seed);
    std::vector<bf16> x = to_bf16(random.normal(c.tokens * c.k)), w = to_bf16(random.normal(c.n * c.k));
    const std::vector<float> bias = random.normal(c.n, 30);
    std::vector<float> expected =
        c.accumulate ? random.normal(c.tokens * c.n, 30) : filled(c.tokens * c.n, kNan);
    const DeviceArray<bf16> device_x(x), device_w(w);
    const DeviceArray<float> device_bias(bias), out(expected);
    LinearArgs args{.x = {x.data(), DType::kBF16, c.tokens, c.k},
                    .weight = w.data(),
                    .bias = c.has_bias ? bias.data() : nullptr,
                    .out = expected.data(),
                    .n = c.n,
                    .accumulate = c.accumulate};
    ref_.linear(args, pool_);
    args.x.data = device_x.data();
    args.weight = device_w.data();
    if (c.has_bias) args.bias = device_bias.data();
    args.out = out.data();
    ops_.linear(args, pool_);
    wait();
    // f32 sums of K products of magnitude about 1: in any order the error is below K eps times the magnitude
    // of the sum, sqrt(K).
    const float budget[] = {static_cast<float>(kF32Eps * (static_cast<double>(c.k) + 4) *
                                               (4 * std::sqrt(static_cast<double>(c.k)) + 100))};
    EXPECT_TRUE(within_budget(out.values(), expected, budget))
        << "T=" << c.tokens << " N=" << c.n << " K=" << c.k << " bias " << c.has_bias << " accumulate "
        << c.accumulate;
    return out.values();
  }
};

TEST_F(LinearCuda, EveryNumberOfFewTokens) {
  for (int64_t t = 0; t <= 18; ++t) run({t, 300, 96, t % 2 == 0, t % 3 == 0});
}
TEST_F(LinearCuda, EveryNumberOfOutputs) {
  for (int64_t n : {1, 2, 7, 8, 9, 39, 40, 41, 131, 132, 133, 1055, 1056, 1057, 5281, 5400})
    run({3, n, 64, true});
}
TEST_F(LinearCuda, EveryDepth) {
  for (int64_t k : {32, 64, 96, 224, 256, 288, 1504, 1536, 1568, 2880, 3072, 3104, 4096, 7168, 9216})
    run({5, 150, k, true, true});
}
TEST_F(LinearCuda, DepthsForTheLibrary) {
  for (int64_t k : {8, 24, 40, 100, 33})
    for (int64_t t : {1, 5, 64}) run({t, 70, k, true, true});
}
TEST_F(LinearCuda, ManyTokens) {
  for (int64_t t : {17, 31, 64, 129, 300}) run({t, 200, 128, true, t % 2 == 0}), run({t, 130, 2880});
}
TEST_F(LinearCuda, ModelShapes) {
  for (int64_t t : {1, 4, 16, 40, 64, 128}) run({t, 5120, 2880, true}), run({t, 2880, 4096, true, true});
}
// More tokens than linear_few takes, in clusters: every number of rows per block, with remainders.
TEST_F(LinearCuda, EveryNumberOfTokensOfADecodeBatch) {
  for (int64_t t = 17; t <= 129; ++t) run({t, 68, 72, t % 2 == 0, t % 3 == 0});
}
TEST_F(LinearCuda, EveryNumberOfRowsPerBlock) {
  for (int64_t n : {2,    4,    12,   16,   20,   60,   64,   68,   2044,  2048,  2052,  3072,
                    3076, 4096, 4100, 5116, 5124, 6148, 8192, 8196, 10240, 10244, 14336, 14340})
    for (int64_t t : {33, 128}) run({t, n, 40, n % 8 == 0, n % 3 == 0});
}
TEST_F(LinearCuda, EveryDepthOfADecodeBatch) {
  for (int64_t k : {8, 56, 64, 72, 128, 512, 520, 2048, 2056, 7168})
    for (int64_t n : {200, 5120}) run({20, n, k, true, k % 3 == 0});
}
TEST_F(LinearCuda, ATokenGivesTheSameBitsAmongUpTo64AndAmongMore) {
  constexpr int64_t kMost = 128, kK = 1440;
  for (int64_t n : {1028, 5120}) {
    Random random(2);
    const DeviceArray<bf16> x(to_bf16(random.normal(kMost * kK))), w(to_bf16(random.normal(n * kK)));
    const auto outputs = [&](int64_t t) {
      const DeviceArray<float> out(filled(t * n, kNan));
      ops_.linear({.x = {x.data(), DType::kBF16, t, kK}, .weight = w.data(), .out = out.data(), .n = n},
                  pool_);
      wait();
      return out.values();
    };
    const std::vector<float> among_64 = outputs(64), among_128 = outputs(kMost);
    for (int64_t t : {17, 32, 63, 65, 100, 127}) {
      const std::vector<float> some = outputs(t);
      ASSERT_TRUE(std::equal(some.begin(), some.end(), (t <= 64 ? among_64 : among_128).begin()))
          << n << " T=" << t;
    }
  }
}

TEST_F(LinearCuda, GivesTheSameBitsAlways) {
  for (int64_t t : {1, 16, 40, 100})
    EXPECT_EQ(run({t, 1000, 2880, true, true}), run({t, 1000, 2880, true, true}));
}

// Kernel attributes are per GPU, and so are cuBLASLt's handle and workspace.
TEST_F(LinearCuda, EveryGpuGivesTheSameBits) {
  const LinearCase few{1, 1000, 2880, true, true}, many{40, 1000, 2880, true, true};
  const std::vector<float> few_out = run(few), many_out = run(many);
  int gpu = 1;
  for (; DeviceContext::of(gpu).ok(); ++gpu) {
    const DeviceScope scope(*DeviceContext::of(gpu).value());
    Stream stream = Stream::make().value();
    const StreamScope on_stream(stream);
    ASSERT_TRUE(prepare_cuda_dense_ops().ok());
    EXPECT_EQ(run(few), few_out) << "GPU " << gpu;
    EXPECT_EQ(run(many), many_out) << "GPU " << gpu;
  }
  if (gpu == 1) GTEST_SKIP() << "this machine has one GPU";
}

TEST_F(LinearCuda, ATokenGivesTheSameBitsAmongFew) {
  constexpr int64_t kTokens = 16, kN = 700, kK = 1440;
  Random random(2);
  const DeviceArray<bf16> x(to_bf16(random.normal(kTokens * kK))), w(to_bf16(random.normal(kN * kK)));
  const DeviceArray<float> all(filled(kTokens * kN, kNan)), one(filled(kN, kNan));
  ops_.linear({.x = {x.data(), DType::kBF16, kTokens, kK}, .weight = w.data(), .out = all.data(), .n = kN},
              pool_);
  for (int64_t t = 0; t < kTokens; ++t) {
    ops_.linear(
        {.x = {x.data() + t * kK, DType::kBF16, 1, kK}, .weight = w.data(), .out = one.data(), .n = kN},
        pool_);
    wait();
    const std::vector<float> whole = all.values(), alone = one.values();
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), whole.begin() + t * kN)) << t;
  }
}

// Batch-invariant table: a token gives the same bits alone and as the first and last of few or many tokens.
TEST_F(LinearCuda, ATokenGivesTheSameBitsAmongAnyNumber) {
  const DenseOps& ops = *cuda_invariant_dense_ops();
  constexpr int64_t kMost = 1000;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{5120, 2880}, {2880, 4096}, {576, 7168}, {70, 64}}) {
    Random random(5);
    std::vector<bf16> rows = to_bf16(random.normal(kMost * k));
    const DeviceArray<bf16> w(to_bf16(random.normal(n * k)));
    const DeviceArray<float> bias(random.normal(n));
    std::vector<float> alone;
    for (const int64_t t :
         {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{16}, int64_t{64}, int64_t{130}, kMost}) {
      std::copy_n(rows.begin(), k, rows.begin() + (t - 1) * k);
      const DeviceArray<bf16> x(rows);
      const DeviceArray<float> out(filled(t * n, 1));
      ops.linear({.x = {x.data(), DType::kBF16, t, k},
                  .weight = w.data(),
                  .bias = bias.data(),
                  .out = out.data(),
                  .n = n,
                  .accumulate = true},
                 pool_);
      wait();
      const std::vector<float> all = out.values();
      if (t == 1) alone = all;
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), all.begin())) << n << " x " << k << ", T=" << t;
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), all.end() - n)) << n << " x " << k << ", T=" << t;
    }
  }
}

TEST_F(LinearCuda, NanStaysWithItsToken) {
  for (int64_t t : {6, 40}) {
    constexpr int64_t kN = 200, kK = 128;
    std::vector<float> x = Random(3).normal(t * kK);
    x[2 * kK + 5] = kNan;
    const DeviceArray<bf16> device_x(to_bf16(x)), w(to_bf16(Random(4).normal(kN * kK)));
    const DeviceArray<float> out(filled(t * kN, 0));
    ops_.linear({.x = {device_x.data(), DType::kBF16, t, kK}, .weight = w.data(), .out = out.data(), .n = kN},
                pool_);
    wait();
    const std::vector<float> values = out.values();
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(std::isnan(values[i]), i / kN == 2) << i;
  }
}

TEST_F(DenseOpsCuda, NormLinearIsNormThenLinear) {
  for (int64_t t : {0, 1, 2, 3, 4, 5, 17})
    for (int64_t k : {32, 1024, 1056, 2880, 4096, 5120}) {
      constexpr int64_t kN = 333;
      Random random(static_cast<uint64_t>(k));
      const std::vector<float> x = random.normal(t * k, 5), weight = random.normal(k),
                               bias = random.normal(kN);
      const std::vector<bf16> w = to_bf16(random.normal(kN * k));
      std::vector<float> expected = filled(t * kN, kNan), normed = filled(t * k, 0);
      // The oracle does not round between norm and linear.
      ref_.norm_linear(
          {.norm = {x.data(), weight.data(), 1e-5f, {normed.data(), DType::kF32, t, k}, nullptr},
           .linear = {{normed.data(), DType::kF32, t, k}, w.data(), bias.data(), expected.data(), kN}},
          pool_);
      const DeviceArray<float> device_x(x), device_weight(weight), device_bias(bias),
          out(filled(t * kN, kNan));
      const DeviceArray<bf16> device_w(w), scratch(to_bf16(filled(t * k, kNan)));
      ops_.norm_linear(
          {.norm =
               {device_x.data(), device_weight.data(), 1e-5f, {scratch.data(), DType::kBF16, t, k}, nullptr},
           .linear =
               {{scratch.data(), DType::kBF16, t, k}, device_w.data(), device_bias.data(), out.data(), kN}},
          pool_);
      wait();
      if (t > 0) {
        EXPECT_TRUE(within_relative_l2(out.values(), expected, 0.7 * kBf16Eps)) << t << " x " << k;
      }
    }
}

// Two layers on the same rows have the bits of each alone, in one launch or in two.
TEST_F(DenseOpsCuda, NormLinearOfTwoLayers) {
  for (int64_t t : {0, 1, 3, 4, 6})
    for (const auto& [first, second, k] : {std::tuple<int64_t, int64_t, int64_t>{1536, 576, 7168},
                                           {3072, 576, 2048},
                                           {200, 200, 2880},
                                           {333, 40, 1056},
                                           {40, 333, 1056}}) {
      Random random(static_cast<uint64_t>(first + k));
      const DeviceArray<float> x(random.normal(t * k, 5)), weight(random.normal(k)),
          bias(random.normal(second));
      const DeviceArray<bf16> w_first(to_bf16(random.normal(first * k))),
          w_second(to_bf16(random.normal(second * k))), scratch(to_bf16(filled(t * k, kNan)));
      const DeviceArray<float> out_first(filled(t * first, kNan)), out_second(filled(t * second, kNan)),
          alone_first(filled(t * first, kNan)), alone_second(filled(t * second, kNan));
      const ActRows rows{scratch.data(), DType::kBF16, t, k};
      const RmsNormArgs norm{x.data(), weight.data(), 1e-6f, rows, nullptr};
      const auto layer = [&](const DeviceArray<bf16>& w, const float* b, const DeviceArray<float>& out,
                             int64_t n) {
        return LinearArgs{rows, w.data(), b, out.data(), n};
      };
      ops_.norm_linear(
          {norm, layer(w_first, nullptr, out_first, first), layer(w_second, bias.data(), out_second, second)},
          pool_);
      ops_.norm_linear({norm, layer(w_first, nullptr, alone_first, first)}, pool_);
      ops_.norm_linear({norm, layer(w_second, bias.data(), alone_second, second)}, pool_);
      wait();
      EXPECT_TRUE(same_bits(out_first.values(), alone_first.values())) << t << ": " << first << " x " << k;
      EXPECT_TRUE(same_bits(out_second.values(), alone_second.values())) << t << ": " << second << " x " << k;
      for (const float v : out_second.values()) ASSERT_FALSE(std::isnan(v));
    }
}

TEST_F(DenseOpsCuda, Embed) {
  for (int64_t t : {0, 1, 9})
    for (int64_t h : {1, 33, 1024, 2880}) {
      const std::vector<bf16> table = to_bf16(Random(5).normal(50 * h));
      std::vector<int32_t> ids;
      for (int64_t i = 0; i < t; ++i) ids.push_back(static_cast<int32_t>(i * 7 % 50));
      std::vector<float> expected = filled(t * h, kNan);
      ref_.embed({table.data(), ids.data(), expected.data(), t, h}, pool_);
      const DeviceArray<bf16> device_table(table);
      const DeviceArray<int32_t> device_ids(ids);
      const DeviceArray<float> out(filled(t * h, kNan));
      ops_.embed({device_table.data(), device_ids.data(), out.data(), t, h}, pool_);
      wait();
      EXPECT_TRUE(same_bits(out.values(), expected)) << t << " x " << h;
    }
}

TEST_F(DenseOpsCuda, RmsNorm) {
  for (int64_t h : {1, 3, 31, 128, 129, 2880, 4095, 4096, 7168, 9001})
    for (int64_t t : {0, 1, 5}) {
      const std::vector<float> x = Random(6).normal(t * h, 3), weight = Random(7).normal(h);
      std::vector<float> expected = filled(t * h, kNan);
      ref_.rms_norm({x.data(), weight.data(), 1e-5f, {nullptr, DType::kBF16, t, h}, expected.data()}, pool_);
      const DeviceArray<float> device_x(x), device_weight(weight), out(filled(t * h, kNan));
      const DeviceArray<bf16> out_act(to_bf16(filled(t * h, kNan)));
      const RmsNormArgs args{
          device_x.data(), device_weight.data(), 1e-5f, {out_act.data(), DType::kBF16, t, h}, out.data()};
      ops_.rms_norm(args, pool_);
      wait();
      std::vector<float> budget;
      for (float y : expected)
        budget.push_back(static_cast<float>(std::abs(y) * kF32Eps * (static_cast<double>(h) / 64 + 12)) +
                         1e-30f);
      EXPECT_TRUE(within_budget(out.values(), expected, budget)) << t << " x " << h;
      std::vector<float> rounded;
      for (float y : out.values()) rounded.push_back(round_to_bf16(y));
      EXPECT_TRUE(same_bits(to_float(out_act.values()), rounded));
      // In place.
      ops_.rms_norm({out.data(), device_weight.data(), 1e-5f, {nullptr, DType::kBF16, t, h}, out.data()},
                    pool_);
      wait();
    }
}

TEST_F(DenseOpsCuda, HeadNorm) {
  for (int head_dim : {1, 31, 64, 80, 128, 512})
    for (auto [t, heads] : {std::pair{0, 3}, {1, 1}, {2, 5}, {9, 3}}) {
      const int64_t stride = heads * head_dim + 3;
      std::vector<float> x = Random(8).normal(t * stride, 3);
      const std::vector<float> weight = Random(9).normal(head_dim);
      const DeviceArray<float> device_x(x), device_weight(weight);
      ref_.head_norm({x.data(), weight.data(), 1e-5f, t, stride, heads, head_dim}, pool_);
      ops_.head_norm({device_x.data(), device_weight.data(), 1e-5f, t, stride, heads, head_dim}, pool_);
      wait();
      std::vector<float> budget;
      for (float y : x) budget.push_back(static_cast<float>(std::abs(y) * kF32Eps * 24) + 1e-30f);
      EXPECT_TRUE(within_budget(device_x.values(), x, budget)) << t << " x " << heads << " x " << head_dim;
    }
}

// The columns between heads are NaN. The last case has more tiles than run at once.
TEST_F(DenseOpsCuda, HeadLinear) {
  const DenseOps& invariant = *cuda_invariant_dense_ops();
  for (DType dtype : {DType::kF32, DType::kBF16})
    for (auto [t, heads, n, k] : {std::array{0, 3, 8, 8},
                                  {1, 2, 17, 33},
                                  {5, 3, 64, 40},
                                  {3, 2, 64, 32},
                                  {16, 2, 65, 128},
                                  {9, 2, 70, 1100},
                                  {17, 4, 128, 512},
                                  {70, 2, 30, 96},
                                  {100, 3, 512, 128},
                                  {200, 40, 260, 96}}) {
      SCOPED_TRACE(testing::Message() << t << " x " << heads << " x " << n << " x " << k);
      const int64_t x_head = k + 4, x_stride = heads * x_head, out_head = n + 3,
                    out_stride = heads * out_head + 1;
      Random random(11);
      std::vector<float> x = random.normal(t * x_stride);
      for (int64_t i = 0; i < std::ssize(x); ++i)
        if (i % x_head >= k) x[static_cast<size_t>(i)] = kNan;
      const std::vector<bf16> w = to_bf16(random.normal(heads * n * k));
      ActBuffer expected(dtype, t, out_stride, filled(t * out_stride, 42));
      HeadLinearArgs args{x.data(), x_stride,   x_head,   w.data(), expected.view().data,
                          dtype,    out_stride, out_head, t,        n,
                          k,        heads,      0.5f};
      ref_.head_linear(args, pool_);
      std::vector<float> budget;
      for (float y : expected.values())  // errors: the split of x, and sums of k products
        budget.push_back(y == 42
                             ? 0
                             : static_cast<float>((0x1p-16 + k * kF32Eps) * 4 * std::sqrt(k) +
                                                  (dtype == DType::kBF16 ? 2 * kBf16Eps * std::abs(y) : 0)));
      const DeviceArray<float> device_x(x), out_f32(filled(t * out_stride, 42));
      const DeviceArray<bf16> device_w(w), out_bf16(to_bf16(filled(t * out_stride, 42)));
      args.weight = device_w.data();
      const auto run = [&](const DenseOps& ops, int64_t first, int64_t rows) {
        args.x = device_x.data() + first * x_stride, args.num_tokens = rows;
        args.out = dtype == DType::kF32 ? static_cast<void*>(out_f32.data() + first * out_stride)
                                        : out_bf16.data() + first * out_stride;
        ops.head_linear(args, pool_);
        wait();
        return dtype == DType::kF32 ? out_f32.values() : to_float(out_bf16.values());
      };
      EXPECT_TRUE(within_budget(run(ops_, 0, t), expected.values(), budget));
      const std::vector<float> got = run(invariant, 0, t);
      EXPECT_TRUE(within_budget(got, expected.values(), budget)) << "invariant";
      if (t == 0) continue;
      EXPECT_EQ(run(invariant, t - 1, 1), got) << "the last token alone has other bits";
      EXPECT_EQ(run(invariant, t / 2, t - t / 2), got);
    }
}

TEST_F(DenseOpsCuda, SiluMul) {
  for (DType dtype : {DType::kF32, DType::kBF16})
    for (int64_t cols : {1, 33, 256, 257, 2048})
      for (int64_t t : {0, 1, 7}) {
        const std::vector<float> gate_up = Random(12).normal(t * 2 * cols, 5);
        ActBuffer expected(dtype, t, cols);
        ref_.silu_mul({gate_up.data(), expected.view()}, pool_);
        const DeviceArray<float> device_in(gate_up), out_f32(filled(t * cols, kNan));
        const DeviceArray<bf16> out_bf16(to_bf16(filled(t * cols, kNan)));
        void* out = dtype == DType::kF32 ? static_cast<void*>(out_f32.data()) : out_bf16.data();
        ops_.silu_mul({device_in.data(), {out, dtype, t, cols}}, pool_);
        wait();
        std::vector<float> budget;
        for (float y : expected.values())
          budget.push_back(
              static_cast<float>(std::abs(y) * (5e-7 + (dtype == DType::kBF16 ? 2 * kBf16Eps : 0))) + 1e-30f);
        EXPECT_TRUE(within_budget(dtype == DType::kF32 ? out_f32.values() : to_float(out_bf16.values()),
                                  expected.values(), budget));
      }
}

TEST_F(DenseOpsCuda, RowOpsAreExact) {
  for (int64_t t : {0, 1, 6})
    for (int64_t h : {1, 100, 1025, 2880}) {
      const std::vector<float> x = Random(13).normal(t * h), y = Random(14).normal(t * h);
      std::vector<float> expected = y;
      const DeviceArray<float> device_x(x), sum(y), gathered(filled(t * h, kNan)),
          copied(filled(t * (h + 2), kNan));
      ref_.add({x.data(), expected.data(), t * h}, pool_);
      ops_.add({device_x.data(), sum.data(), t * h}, pool_);
      const std::vector<int64_t> rows = {5, 0, 2, 2, 1, 3};
      const std::vector<int64_t> first(rows.begin() + (t == 1), rows.begin() + (t == 1) + t);
      const DeviceArray<int64_t> device_rows(first);
      ops_.gather_rows({device_x.data(), gathered.data(), device_rows.data(), t, h * 4}, pool_);
      ops_.copy_heads({device_x.data(), h, h / 2, copied.data(), h + 2, h / 2 + 1, t, h / 2, 2}, pool_);
      const DeviceArray<bf16> rounded(t * (h + 2));
      const DeviceArray<float> same(t * (h + 2));
      ops_.convert_rows({device_x.data(), h, rounded.data(), DType::kBF16, h + 2, t, h}, pool_);
      ops_.convert_rows({device_x.data(), h, same.data(), DType::kF32, h + 2, t, h}, pool_);
      wait();
      EXPECT_TRUE(same_bits(sum.values(), expected));
      std::vector<float> copies = filled(t * (h + 2), kNan), gather = filled(t * h, kNan);
      ref_.gather_rows({x.data(), gather.data(), first.data(), t, h * 4}, pool_);
      ref_.copy_heads({x.data(), h, h / 2, copies.data(), h + 2, h / 2 + 1, t, h / 2, 2}, pool_);
      EXPECT_TRUE(same_bits(gathered.values(), gather));
      EXPECT_TRUE(same_bits(copied.values(), copies));
      std::vector<bf16> rounds = poisoned<bf16>(t * (h + 2));
      std::vector<float> sames = poisoned<float>(t * (h + 2));
      ref_.convert_rows({x.data(), h, rounds.data(), DType::kBF16, h + 2, t, h}, pool_);
      ref_.convert_rows({x.data(), h, sames.data(), DType::kF32, h + 2, t, h}, pool_);
      EXPECT_TRUE(same_bits(to_float(rounded.values()), to_float(rounds)));
      EXPECT_TRUE(same_bits(same.values(), sames));
    }
}

TEST_F(DenseOpsCuda, SigmoidGate) {
  for (int64_t t : {0, 1, 6})
    for (int64_t h : {1, 100, 257, 2048}) {
      const std::vector<float> x = Random(15).normal(t * h), w = Random(16).normal(h, 0.1f);
      std::vector<float> expected = Random(17).normal(t * h);
      const DeviceArray<float> device_x(x), device_w(w), out(expected);
      ref_.sigmoid_gate({x.data(), w.data(), expected.data(), t, h}, pool_);
      ops_.sigmoid_gate({device_x.data(), device_w.data(), out.data(), t, h}, pool_);
      wait();
      std::vector<float> budget;
      for (float y : expected) budget.push_back(std::abs(y) * 3e-6f + 1e-30f);
      EXPECT_TRUE(within_budget(out.values(), expected, budget));
    }
}

}  // namespace
}  // namespace fp4moe
