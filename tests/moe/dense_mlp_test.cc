// Tests the dense MLP alone, in shards and as a layer's shared expert, and FP4 linear layers with any N.
#include "moe/dense_mlp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <list>

#include "formats/e4m3.h"
#include "moe/fp4_linear.h"
#include "moe/layer_case.h"
#include "moe/moe_oracle.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kHidden = 64, kIntermediate = 112;  // I: 7 blocks of 16

MoePlan plan_of(const char* compute, int tp = 1, int rank = 0) {
  MoeProblem p{kHidden, 32, 4, 2, Fp4Format::kNvfp4, {ActivationKind::kSilu}};
  const auto plan = plan_moe(p, {.fp4_compute = compute, .tp = tp});
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return plan->at_rank(rank);
}

// An FP4 or bf16 MLP. `experts` holds the FP4 weights as a layer's only expert, for the oracle.
struct MlpCase {
  explicit MlpCase(bool is_fp4)
      : random(3), experts({kHidden, kIntermediate, 1, 1}, Fp4Format::kNvfp4, ActivationKind::kSilu) {
    ExpertWeightsView& w = experts.weights.experts[0];
    w.gate_bias = w.up_bias = w.down_bias = nullptr;
    view = {kHidden, kIntermediate, {}, {}, {}};
    const auto fill = [&](LinearWeightsView& to, const Fp4MatrixView& fp4, float scale) {
      to.n = fp4.rows;
      to.k = fp4.cols;
      to.is_fp4 = is_fp4;
      if (is_fp4) {
        to.fp4 = fp4;
        to.input_scale = scale;
      } else {
        values.push_back(to_bf16(random.normal(fp4.rows * fp4.cols, 0.1f)));
      }
    };
    fill(view.gate, w.gate, w.gate_input_scale);
    fill(view.up, w.up, w.up_input_scale);
    fill(view.down, w.down, w.down_input_scale);
    if (is_fp4) return;
    view.gate.weight = values[0].data();
    view.up.weight = values[1].data();
    view.down.weight = values[2].data();
  }

  std::vector<float> expected(const Numerics& n, const std::vector<float>& x) const {
    std::vector<float> out;
    for (size_t t = 0; t < x.size() / kHidden; ++t) {
      const std::vector<float> row(x.begin() + static_cast<int64_t>(t * kHidden),
                                   x.begin() + static_cast<int64_t>((t + 1) * kHidden));
      const std::vector<double> y =
          view.gate.is_fp4 ? oracle_expert({&experts.weights, {ActivationKind::kSilu}, n}, 0, row)
                           : bf16_mlp(row);
      out.insert(out.end(), y.begin(), y.end());
    }
    return out;
  }

  Random random;
  ExpertsCase experts;
  std::vector<std::vector<bf16>> values;
  MlpWeightsView view;

 private:
  static double dot(const bf16* w, const std::vector<float>& x) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(bf16_to_float(w[i])) * x[i];
    return sum;
  }
  std::vector<double> bf16_mlp(const std::vector<float>& x) const {
    std::vector<float> h;
    for (int64_t i = 0; i < kIntermediate; ++i) {
      const double g = dot(view.gate.weight + i * kHidden, x), u = dot(view.up.weight + i * kHidden, x);
      h.push_back(round_to_bf16(static_cast<float>(g / (1 + std::exp(-g)) * u)));
    }
    std::vector<double> y;
    for (int64_t i = 0; i < kHidden; ++i) y.push_back(dot(view.down.weight + i * kIntermediate, h));
    return y;
  }
};

std::vector<float> run(const DenseMlp& mlp, const std::vector<float>& x) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / kHidden;
  ThreadPool pool(2);
  ActBuffer act(DType::kBF16, tokens, kHidden, x);
  Arena scratch = std::move(*Arena::make(mlp.scratch_bytes(tokens)));
  std::vector<float> out(x.size(), NAN);
  mlp.forward_mlp(act.view(), out.data(), scratch, pool);
  return out;
}

std::unique_ptr<DenseMlp> make(const MoePlan& plan, const MlpWeightsView& view, Shard shard) {
  ThreadPool pool(2);
  auto mlp = DenseMlp::make(plan, cpu_dense_ops(best_isa()), view, shard, pool);
  EXPECT_TRUE(mlp.ok()) << mlp.status().to_string();
  return std::move(*mlp);
}

TEST(DenseMlpTest, AgreesWithTheOracleUnderEveryScheme) {
  for (bool is_fp4 : {true, false})
    for (const char* compute : {"w4a16", "w4a4", "w4a8"}) {
      MlpCase c(is_fp4);
      const MoePlan plan = plan_of(compute);
      const std::vector<float> x = c.experts.tokens(9);
      const std::vector<float> y = run(*make(plan, c.view, {0, kIntermediate}), x);
      EXPECT_TRUE(within_relative_l2(y, c.expected(plan.numerics(), x), 3e-3)) << is_fp4 << " " << compute;
    }
}

TEST(DenseMlpTest, ShardsAddUpAndOneWithoutABlockIsZero) {
  for (bool is_fp4 : {true, false}) {
    MlpCase c(is_fp4);
    const MoePlan plan = plan_of("w4a4");
    const std::vector<float> x = c.experts.tokens(5), whole = c.expected(plan.numerics(), x);
    EXPECT_EQ(dense_mlp_block(c.view), 16);
    std::vector<float> sum(whole.size());
    for (int rank = 0; rank < 8; ++rank) {  // 7 blocks
      const Shard shard = shard_blocks(kIntermediate, 16, 8, rank);
      const std::vector<float> part = run(*make(plan, c.view, shard), x);
      if (rank == 7) {
        EXPECT_EQ(part, std::vector<float>(part.size(), 0.0f));
      }
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    // Each bf16 shard rounds its part of the intermediate; FP4 shards quantise the same blocks as the whole
    // MLP.
    EXPECT_TRUE(within_relative_l2(sum, whole, 3e-3)) << is_fp4;
  }
}

// The MLP of bf16 weights that FP8 codes with scales for blocks or rows represent exactly; its shards add up.
TEST(DenseMlpTest, Fp4ShardsHaveWholeTilesIfTheWidthAllows) {
  MlpCase c(/*is_fp4=*/true);  // NVFP4: blocks of 16
  for (const auto& [width, block] : {std::pair{96, 32}, {160, 32}, {112, 16}, {16, 16}, {2048, 32}}) {
    c.view.intermediate_size = width;
    EXPECT_EQ(dense_mlp_block(c.view), block) << width;
  }
}

TEST(DenseMlpTest, Fp8EqualsItsDequantisedWeights) {
  constexpr int64_t kWide = 192;  // cut into 96 and 96: within a block of 128
  for (const bool has_blocks : {true, false}) {
    Random random(5);
    std::list<std::vector<uint8_t>> codes;
    std::list<std::vector<bf16>> values;
    MlpWeightsView fp8{kHidden, kWide, {}, {}, {}}, bf16_view = fp8;
    const auto fill = [&](LinearWeightsView& to, LinearWeightsView& same, int64_t n, int64_t k) {
      const int64_t row_block = has_blocks ? 128 : 1, col_block = has_blocks ? 128 : k;
      const int64_t per_row = (k + col_block - 1) / col_block;
      std::vector<float> scales;
      for (int64_t i = 0; i < (n + row_block - 1) / row_block * per_row; ++i)
        scales.push_back(std::ldexp(1.0f, static_cast<int>(random.integer(-6, -3))));
      to.n = same.n = n;
      to.k = same.k = k;
      std::vector<uint8_t>& bytes = codes.emplace_back();
      std::vector<bf16>& weights = values.emplace_back();
      for (int64_t i = 0; i < n * k; ++i) {
        bytes.push_back(static_cast<uint8_t>(random.integer(0, 0x40) + 128 * random.integer(0, 1)));
        const float scale = scales[static_cast<size_t>(i / k / row_block * per_row + i % k / col_block)];
        weights.push_back(float_to_bf16(e4m3_decode(bytes.back()) * scale));
      }
      to.fp8_scales = std::make_shared<const std::vector<float>>(std::move(scales));
      to.fp8 = {bytes.data(), to.fp8_scales->data(), row_block, col_block};
      same.weight = weights.data();
    };
    fill(fp8.gate, bf16_view.gate, kWide, kHidden);
    fill(fp8.up, bf16_view.up, kWide, kHidden);
    fill(fp8.down, bf16_view.down, kHidden, kWide);
    EXPECT_EQ(dense_mlp_block(fp8), has_blocks ? 32 : 16);
    const MoePlan plan = plan_of("w4a16");
    const std::vector<float> x = random.normal(5 * kHidden),
                             want = run(*make(plan, bf16_view, {0, kWide}), x);
    EXPECT_TRUE(within_relative_l2(run(*make(plan, fp8, {0, kWide}), x), want, 3e-3));
    std::vector<float> sum(want.size());
    for (int rank = 0; rank < 2; ++rank) {
      const Shard shard = shard_blocks(kWide, dense_mlp_block(fp8), 2, rank);
      const std::vector<float> part = run(*make(plan, fp8, shard), x);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    EXPECT_TRUE(within_relative_l2(sum, want, 3e-3));
  }
}

// The first rank has all columns of a width that has no whole panels.
TEST(DenseMlpTest, EveryWidthIsSplitWithoutRemainder) {
  const MlpCase c(false);
  for (int64_t width = 1; width <= 130; ++width)
    for (const int64_t parts : {1, 2, 5}) {
      MlpWeightsView view = c.view;
      view.intermediate_size = width;
      int64_t end = 0;
      for (int64_t rank = 0; rank < parts; ++rank) {
        const Shard shard = shard_blocks(width, dense_mlp_block(view), parts, rank);
        EXPECT_EQ(shard.first, end);
        end = shard.first + shard.count;
      }
      EXPECT_EQ(end, width);
    }
}

TEST(DenseMlpTest, NoTokens) {
  for (bool is_fp4 : {true, false}) {
    MlpCase c(is_fp4);
    EXPECT_TRUE(run(*make(plan_of("w4a4"), c.view, {0, kIntermediate}), {}).empty());
  }
}

TEST(DenseMlpTest, RefusesAMixOfFp4AndBf16) {
  MlpCase c(true), other(false);
  c.view.down = other.view.down;
  ThreadPool pool(1);
  EXPECT_EQ(
      DenseMlp::make(plan_of("w4a16"), ref_dense_ops(), c.view, {0, kIntermediate}, pool).status().message(),
      "down is bf16, but gate is FP4; the matrices of an MLP must be all FP4, all FP8 or all bf16");
}

// ---- as a shared expert ---------------------------------------------------------------------------

std::vector<float> run_layer(const MoePlan& plan, const ExpertsCase& c, const SharedExpertWeights* shared,
                             const std::vector<float>& x) {
  ThreadPool pool(2);
  const std::vector<bf16> gate = to_bf16(Random(8).normal(c.problem.num_experts * kHidden, 0.2f));
  RouterWeights router{.weight = gate.data()};
  auto layer = MoeLayer::make(plan, cpu_dense_ops(best_isa()), router, c.weights, shared, pool);
  EXPECT_TRUE(layer.ok()) << layer.status().to_string();
  const int64_t tokens = static_cast<int64_t>(x.size()) / kHidden;
  const auto transport = std::move(*make_transport(plan, {.max_group_rows = tokens}));
  Arena scratch = std::move(*Arena::make((*layer)->scratch_bytes(tokens, *transport)));
  ActBuffer act(DType::kBF16, tokens, kHidden, x);
  std::vector<float> residual(x.size());
  EXPECT_TRUE(
      (*layer)->forward_moe({0, act.view(), x.data(), residual.data()}, *transport, scratch, pool).ok());
  return residual;
}

TEST(SharedExpertTest, IsAddedOnceScaledByItsGateAndNotByTheRouters) {
  for (bool is_fp4 : {true, false})
    for (bool gated : {true, false}) {
      MlpCase c(is_fp4);
      const MoePlan plan = plan_of("w4a4");
      ExpertsCase routed({kHidden, 32, 4, 2}, Fp4Format::kNvfp4, ActivationKind::kSilu);
      const std::vector<float> x = routed.tokens(6);
      const std::vector<bf16> gate = to_bf16(c.random.normal(kHidden, 0.3f));
      const SharedExpertWeights shared{c.view, gated ? gate.data() : nullptr};
      std::vector<float> expected = run_layer(plan, routed, nullptr, x);
      const std::vector<float> mlp = c.expected(plan.numerics(), x);
      for (size_t t = 0; t < 6; ++t) {
        double logit = 0;
        for (size_t i = 0; i < kHidden; ++i)
          logit += static_cast<double>(x[t * kHidden + i]) * bf16_to_float(gate[i]);
        const double scale = gated ? 1 / (1 + std::exp(-logit)) : 1;
        for (size_t i = t * kHidden; i < (t + 1) * kHidden; ++i)
          expected[i] += static_cast<float>(scale * mlp[i]);
      }
      EXPECT_TRUE(within_relative_l2(run_layer(plan, routed, &shared, x), expected, 3e-3))
          << is_fp4 << " " << gated;
    }
}

// ---- linears --------------------------------------------------------------------------------------

TEST(Fp4LinearTest, AgreesWithTheOracleForAnyNumberOfRows) {
  for (const char* compute : {"w4a16", "w4a4", "w4a8"})
    for (int64_t n : {16, 40, 17, 3})
      for (bool accumulate : {false, true}) {
        Random random(4);
        const Fp4Matrix matrix(Fp4Format::kNvfp4, n, kHidden, random);
        const std::vector<bf16> bias = to_bf16(random.normal(n));
        LinearWeightsView w{.is_fp4 = true,
                            .fp4 = matrix.view(),
                            .input_scale = 4.0f / 2688,
                            .bias = bias.data(),
                            .n = n,
                            .k = kHidden};
        const MoePlan plan = plan_of(compute);
        ThreadPool pool(2);
        const auto linear = std::move(*Fp4Linear::make(plan, w, pool));
        const std::vector<float> x = to_float(to_bf16(random.normal(5 * kHidden)));
        ActBuffer act(DType::kBF16, 5, kHidden, x);
        Arena scratch = std::move(*Arena::make(linear->scratch_bytes(5)));
        const int64_t stride = n + 2;  // columns from N on must not be written
        std::vector<float> out(static_cast<size_t>(5 * stride), 0.5f);
        linear->forward_fp4_linear(act.view(), out.data(), stride, accumulate, scratch, pool);

        MoeWeightsView weights{
            .format = Fp4Format::kNvfp4, .hidden_size = kHidden, .intermediate_size = 0, .experts = {}};
        const OracleLayer layer{.weights = &weights, .activation = {}, .numerics = plan.numerics()};
        std::vector<float> expected(out.size(), 0.5f);
        for (int64_t t = 0; t < 5; ++t) {
          const std::vector<double> in =
              oracle_quantised(layer, {x.begin() + t * kHidden, x.begin() + (t + 1) * kHidden}, w.input_scale,
                               ActScaleChoice::kScalar);
          for (int64_t i = 0; i < n; ++i) {
            double sum = bf16_to_float(bias[static_cast<size_t>(i)]) + (accumulate ? 0.5 : 0.0);
            for (int64_t k = 0; k < kHidden; ++k)
              sum += static_cast<double>(fp4_at(w.fp4, i, k)) * in[static_cast<size_t>(k)];
            expected[static_cast<size_t>(t * stride + i)] = static_cast<float>(sum);
          }
        }
        EXPECT_TRUE(within_relative_l2(out, expected, 1e-5)) << compute << " N=" << n << " " << accumulate;
        linear->forward_fp4_linear({nullptr, DType::kBF16, 0, kHidden}, nullptr, stride, accumulate, scratch,
                                   pool);
      }
}

}  // namespace
}  // namespace fp4moe
