// Tests the whole layer on every row of the table: results are close to the oracle row's and reproducible.
#include "moe/moe_layer.h"

#include <gtest/gtest.h>

#include <tuple>

#include "moe/layer_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

// Computes the layer in double, directly from fp4_at(), with h rounded like the activations.
std::vector<float> exact_layer(LayerCase& c, DType dtype, const std::vector<float>& x) {
  const MoeProblem& p = c.problem;
  const auto round = [&](double v) {
    return dtype == DType::kBF16 ? round_to_bf16(static_cast<float>(v)) : static_cast<float>(v);
  };
  std::vector<float> out;
  for (size_t t = 0; t < x.size() / static_cast<size_t>(p.hidden_size); ++t) {
    const float* x_row = &x[t * static_cast<size_t>(p.hidden_size)];
    std::vector<float> act, logits;
    for (int64_t i = 0; i < p.hidden_size; ++i) act.push_back(round(x_row[i]));
    for (int64_t e = 0; e < p.num_experts; ++e) {
      double sum = 0;
      for (int64_t i = 0; i < p.hidden_size; ++i)
        sum += static_cast<double>(x_row[i]) * bf16_to_float(c.router.weight[e * p.hidden_size + i]);
      logits.push_back(static_cast<float>(sum));
    }
    std::vector<int32_t> ids(static_cast<size_t>(p.top_k));
    std::vector<float> route(ids.size());
    choose_experts(logits.data(), {.num_experts = p.num_experts, .top_k = p.top_k}, ids.data(), route.data());
    std::vector<double> sum(static_cast<size_t>(p.hidden_size));
    for (size_t k = 0; k < ids.size(); ++k) {
      const ExpertWeightsView& w = c.weights.experts[static_cast<size_t>(ids[k])];
      std::vector<float> h;
      for (int64_t i = 0; i < p.intermediate_size; ++i) {
        const double g = is_gated(p.activation.kind)
                             ? exact_dot(w.gate, i, act.data()).sum + bf16_to_float(w.gate_bias[2 * i])
                             : 0;
        const double u = exact_dot(w.up, i, act.data()).sum + bf16_to_float(w.up_bias[2 * i]);
        h.push_back(round(exact_activation(p.activation, g, u)));
      }
      for (int64_t i = 0; i < p.hidden_size; ++i)
        sum[static_cast<size_t>(i)] +=
            route[k] * (exact_dot(w.down, i, h.data()).sum +
                        (w.down_bias == nullptr ? 0.0f : bf16_to_float(w.down_bias[i])));
    }
    for (size_t i = 0; i < sum.size(); ++i)
      out.push_back(static_cast<float>(sum[i] + 0.001f * static_cast<float>(i)));
  }
  return out;
}

class MoeLayerTest : public testing::TestWithParam<std::tuple<const RunnerRow*, Fp4Format>> {
 protected:
  const RunnerRow& row() const { return *std::get<0>(GetParam()); }
  Fp4Format format() const { return std::get<1>(GetParam()); }
  std::vector<DType> act_types() const {
    std::vector<DType> types;
    for (DType d : {DType::kBF16, DType::kF32})
      if (row().act_dtypes.has(d)) types.push_back(d);
    return types;
  }
  void SetUp() override {
    if (!isa_available(row().isa)) GTEST_SKIP() << "this CPU does not run " << row().name;
  }
};

std::vector<std::tuple<const RunnerRow*, Fp4Format>> all_params() {
  std::vector<std::tuple<const RunnerRow*, Fp4Format>> params;
  for (const RunnerRow& row : runner_rows())  // GPU rows: device_layer_test.cc
    for (const Fp4Format format : kExpertFormats)
      if (row.device == DeviceKind::kCpu && row.formats.has(format) && row.schemes.has(Scheme::kW4A16))
        params.push_back({&row, format});
  return params;
}

INSTANTIATE_TEST_SUITE_P(Table, MoeLayerTest, testing::ValuesIn(all_params()), [](const auto& row) {
  return std::string(std::get<0>(row.param)->name) + "_" + fp4_format_name(std::get<1>(row.param));
});

TEST_P(MoeLayerTest, AgreesWithDoubleArithmetic) {
  const LayerSize sizes[] = {{32, 32, 1, 1}, {96, 64, 5, 2}, {64, 192, 8, 4}};
  for (const LayerSize& size : sizes) {
    for (ActivationKind kind : {ActivationKind::kSwigluOai, ActivationKind::kSilu, ActivationKind::kRelu2}) {
      LayerCase c(size, format(), kind);
      const std::vector<float> x = c.tokens(19);
      for (DType dtype : act_types())
        EXPECT_TRUE(within_relative_l2(c.run(row().name, dtype, x), exact_layer(c, dtype, x), 3e-3))
            << "H=" << size.hidden << " activation " << int(kind) << " " << dtype_name(dtype);
    }
  }
}

TEST_P(MoeLayerTest, LargeLayerAgreesWithTheOracleRow) {
  LayerCase c({2880, 96, 4, 2}, format(), ActivationKind::kSwigluOai);
  const std::vector<float> x = c.tokens(17);
  const Fp4Format of_ref = format() == Fp4Format::kNone ? Fp4Format::kMxfp4 : format();
  LayerCase ref({2880, 96, 4, 2}, of_ref, ActivationKind::kSwigluOai);  // the same values
  EXPECT_TRUE(within_relative_l2(c.run(row().name, DType::kBF16, x), ref.run("ref", DType::kBF16, x), 3e-3));
}

TEST_P(MoeLayerTest, NoTokens) {
  LayerCase c({32, 32, 4, 2}, format(), ActivationKind::kSwigluOai);
  EXPECT_TRUE(c.run(row().name, act_types().front(), {}).empty());
}

TEST_P(MoeLayerTest, AllTokensToOneExpertAndTheOthersIdle) {
  LayerCase c({64, 64, 6, 1}, format(), ActivationKind::kSwigluOai);
  c.router.bias = {0, 0, 0, 1e6f, 0, 0};
  const std::vector<float> x = c.tokens(40);
  LayerCase only({64, 64, 1, 1}, format(), ActivationKind::kSwigluOai);
  only.weights.experts = {c.weights.experts[3]};
  if (format() == Fp4Format::kNone) only.weights.bf16_experts = {c.weights.bf16_experts[3]};
  EXPECT_EQ(c.run(row().name, DType::kBF16, x), only.run(row().name, DType::kBF16, x));
}

TEST_P(MoeLayerTest, CountsAndTellsTheTokensOfEachExpert) {
  LayerCase c({64, 64, 6, 2}, format(), ActivationKind::kSwigluOai);
  c.router.bias = {0, 1e6f, 0, 2e6f, 0, 0};
  const std::unique_ptr<ExpertCounters> counters = ExpertCounters::make({0, 3}, 6).value();
  c.counters = counters.get();
  std::vector<int32_t> ids(2 * 40, -1), expected;
  c.expert_ids = ids.data();
  c.run(row().name, act_types().front(), c.tokens(40));
  for (int t = 0; t < 40; ++t) expected.insert(expected.end(), {3, 1});  // best first
  EXPECT_EQ(ids, expected);
  c.run(row().name, act_types().front(), c.tokens(1));
  c.run(row().name, act_types().front(), {});
  std::vector<int64_t> sums(12, 100);
  ASSERT_TRUE(counters->add_to(sums).ok());
  EXPECT_EQ(sums, (std::vector<int64_t>{100, 141, 100, 141, 100, 100, 100, 100, 100, 100, 100, 100}));
}

// Skewed routing: expert 0 gets a row of every token; the other experts share each token's second row.
TEST_P(MoeLayerTest, SameBitsAloneInABatchAndOnAnyNumberOfThreads) {
  LayerCase c({96, 64, 9, 2}, format(), ActivationKind::kSwigluOai);
  c.router.bias = {1e6f, 0, 0, 0, 0, 0, 0, 0, 0};
  const std::vector<float> x = c.tokens(41);
  const std::vector<float> batch = c.run(row().name, DType::kBF16, x, 1);
  EXPECT_EQ(c.run(row().name, DType::kBF16, x, 2), batch);
  EXPECT_EQ(c.run(row().name, DType::kBF16, x, 5), batch);
  ThreadPool pool(2);
  const auto layer = c.make(row().name, DType::kBF16, pool);
  for (int64_t t = 0; t < 41; ++t) {
    const auto first = t * 96, last = first + 96;
    EXPECT_EQ(c.run(*layer, DType::kBF16, {x.begin() + first, x.begin() + last}, pool),
              std::vector<float>(batch.begin() + first, batch.begin() + last))
        << "token " << t;
  }
}

TEST_P(MoeLayerTest, MaskedBatchesGiveTheBitsOfPackedOnes) {
  if (!row().layouts.has(BatchLayout::kMasked))
    GTEST_SKIP() << row().name << " does not support masked batches";
  LayerCase c({64, 32, 3, 1}, format(), ActivationKind::kSwigluOai);
  ThreadPool pool(2);
  const PackedExperts experts = std::move(*row().pack(row(), c.problem, {}, c.weights, pool));
  const int64_t counts[] = {2, 0, 5}, offsets[] = {0, 2, 2, 7}, capacity = 6;
  const std::vector<float> x = c.tokens(7);
  std::vector<float> masked_x(static_cast<size_t>(3 * capacity * 64), NAN);  // NaN: rows not to be read
  for (int64_t e = 0; e < 3; ++e)
    std::copy_n(x.begin() + offsets[e] * 64, counts[e] * 64, masked_x.begin() + e * capacity * 64);
  ActBuffer packed_act(DType::kBF16, 7, 64, x), masked_act(DType::kBF16, 3 * capacity, 64, masked_x);
  std::vector<float> packed_y(7 * 64), masked_y(static_cast<size_t>(3 * capacity * 64), -1.0f);
  ExpertBatch packed{.num_experts = 3, .offsets = offsets, .x = packed_act.view(), .y = packed_y.data()};
  ExpertBatch masked{.layout = BatchLayout::kMasked,
                     .num_experts = 3,
                     .counts = counts,
                     .capacity = capacity,
                     .x = masked_act.view(),
                     .y = masked_y.data()};
  for (const ExpertBatch* batch : {&packed, &masked}) {
    Arena scratch = std::move(*Arena::make(row().scratch_bytes(c.problem, {}, batch->x.rows)));
    row().run(row(), {c.problem, experts, *batch}, scratch, pool);
  }
  for (int64_t e = 0; e < 3; ++e)
    for (int64_t r = 0; r < capacity; ++r)
      for (int64_t h = 0; h < 64; ++h)
        EXPECT_EQ(masked_y[static_cast<size_t>((e * capacity + r) * 64 + h)],
                  r < counts[e] ? packed_y[static_cast<size_t>((offsets[e] + r) * 64 + h)] : -1.0f);
}

TEST(MoeLayerMakeTest, WrongOrderOfGateAndUpFails) {
  LayerCase c({64, 64, 4, 2}, Fp4Format::kMxfp4, ActivationKind::kSwigluOai);
  const std::vector<float> x = c.tokens(8), expected = exact_layer(c, DType::kBF16, x);
  for (ExpertWeightsView& w : c.weights.experts) std::swap(w.gate, w.up);
  EXPECT_FALSE(within_relative_l2(c.run("ref", DType::kBF16, x), expected, 0.1));
}

TEST(MoeLayerMakeTest, Bf16WeightsThatContradictThePlanAreRefused) {
  LayerCase c({64, 32, 4, 2}, Fp4Format::kNone, ActivationKind::kSwigluOai);
  ThreadPool pool(1);
  const MoePlan plan = *plan_moe(c.problem, {});
  EXPECT_STREQ(plan.runner()->name, "cpu_bf16");
  c.weights.bf16_experts[2].down.cols = 64;
  EXPECT_EQ(MoeLayer::make(plan, ref_dense_ops(), c.router, c.weights, nullptr, pool).status().message(),
            "expert 2: down is bf16 [64, 64], but the plan has [64, 32]");
  c.weights.bf16_experts.pop_back();
  EXPECT_EQ(MoeLayer::make(plan, ref_dense_ops(), c.router, c.weights, nullptr, pool).status().message(),
            "the weights have 3 bf16 experts, but the plan has 4");
}

// Both tokens are routed to expert 1: calibration records only the values that reach that expert.
TEST(MoeLayerMakeTest, CalibrationRecordsWhatEachExpertSees) {
  LayerCase c({64, 32, 3, 1}, Fp4Format::kNone, ActivationKind::kSwigluOai);
  c.router.bias = {0, 1e6f, 0};
  ThreadPool pool(2);
  Calibration calibration;
  const auto layer = [&] {
    const CalibrationScope scope(calibration);
    return c.make("cpu_bf16", DType::kBF16, pool);
  }();
  ASSERT_EQ(calibration.size(), 1U);
  const std::vector<float> x = c.tokens(2);
  c.run(*layer, DType::kBF16, x, pool);
  float largest = 0, inner = 0;
  for (const float v : x) largest = std::max(largest, std::fabs(round_to_bf16(v)));
  const ExpertWeightsView& w = c.weights.experts[1];
  for (size_t t = 0; t < 2; ++t) {
    std::vector<float> act;
    for (size_t i = 0; i < 64; ++i) act.push_back(round_to_bf16(x[t * 64 + i]));
    for (int64_t i = 0; i < 32; ++i) {
      const double g = exact_dot(w.gate, i, act.data()).sum + bf16_to_float(w.gate_bias[2 * i]);
      const double u = exact_dot(w.up, i, act.data()).sum + bf16_to_float(w.up_bias[2 * i]);
      inner = std::max(inner, static_cast<float>(std::fabs(exact_activation(c.problem.activation, g, u))));
    }
  }
  EXPECT_EQ(calibration[0]->input, (std::vector<float>{0, largest, 0}));
  EXPECT_NEAR(calibration[0]->intermediate[1], inner, 0.01 * inner);
  EXPECT_EQ(calibration[0]->intermediate[0], 0);
}

TEST(MoeLayerMakeTest, WeightsThatContradictThePlanAreRefused) {
  LayerCase c({64, 32, 4, 2}, Fp4Format::kMxfp4, ActivationKind::kSwigluOai);
  ThreadPool pool(1);
  const MoePlan plan = *plan_moe(c.problem, {.runner = "ref"});
  c.weights.experts[2].down.cols = 64;
  EXPECT_EQ(MoeLayer::make(plan, ref_dense_ops(), c.router, c.weights, nullptr, pool).status().message(),
            "expert 2: down is mxfp4 [64, 64], but the plan has mxfp4 [64, 32]");
  c.weights.experts.pop_back();
  EXPECT_EQ(MoeLayer::make(plan, ref_dense_ops(), c.router, c.weights, nullptr, pool).status().message(),
            "the weights have 3 experts, but the plan has 4");
}

}  // namespace
}  // namespace fp4moe
