// The self-test passes on correct weights and names the layer and expert of faulty weights.
#include "engine/startup/self_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "io/checkpoint/expert_weights.h"
#include "moe/expert_probe.h"

namespace fp4moe {
namespace {

struct Demo {
  ModelConfig config;
  Checkpoint checkpoint;
  ModelPlan plan;
};

Demo demo(const std::string& self_test, const std::string& runner = "auto",
          const std::string& scheme = "auto", const std::string& a2a = "none",
          const std::string& folder = FP4MOE_DEMO_MODEL) {
  EngineConfig flags;
  flags.self_test = self_test;
  flags.moe_runner_backend = runner;
  flags.moe_a2a_backend = a2a;
  flags.fp4_compute = scheme;
  Result<ModelConfig> config = load_model_config(folder);
  Result<Checkpoint> checkpoint = Checkpoint::open(folder);
  EXPECT_TRUE(config.ok() && checkpoint.ok());
  Result<ModelPlan> plan = plan_model(*config, flags);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return {std::move(*config), std::move(*checkpoint), std::move(*plan)};
}

TEST(SelfTest, EveryRowPassesOnTheDemo) {
  ThreadPool pool(2);
  for (const char* runner : {"auto", "cpu_scalar", "marlin", "ref"}) {
    const Demo d = demo("full", runner);
    const Result<SelfTestReport> report = self_test(d.checkpoint, d.config, d.plan, pool);
    ASSERT_TRUE(report.ok()) << runner << ": " << report.status().to_string();
    EXPECT_EQ(report->num_layers, d.config.num_layers);
    EXPECT_EQ(report->num_experts, d.config.num_layers * d.config.num_experts);
    EXPECT_EQ(report->worst_error == 0, std::string(runner) == "ref")
        << "only the oracle has no error against itself";
  }
}

TEST(SelfTest, EverySchemeAndLayoutPasses) {
  ThreadPool pool(2);
  for (const char* a2a : {"none", "deepep"})
    for (const char* scheme : {"w4a16", "w4a8"}) {
      const Demo d = demo("fast", "auto", scheme, a2a);
      const Result<SelfTestReport> report = self_test(d.checkpoint, d.config, d.plan, pool);
      EXPECT_TRUE(report.ok()) << scheme << a2a << ": " << report.status().to_string();
    }
  for (const char* runner : {"flashinfer_cutedsl", "flashinfer_cutlass"})
    for (const char* a2a : {"none", "deepep"}) {
      const Demo d = demo("full", runner, "auto", a2a, FP4MOE_DEMO_NVFP4);
      const Result<SelfTestReport> report = self_test(d.checkpoint, d.config, d.plan, pool);
      EXPECT_TRUE(report.ok()) << runner << a2a << ": " << report.status().to_string();
    }
}

TEST(SelfTest, FastLooksAtSomeExpertsOfOneLayer) {
  ThreadPool pool(2);
  const Demo d = demo("fast");
  const Result<SelfTestReport> report = self_test(d.checkpoint, d.config, d.plan, pool);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->num_layers, 1);
  EXPECT_EQ(report->num_experts, 4);
}

class Faults : public testing::Test {
 protected:
  Faults()
      : demo_(demo("full")), good_(*load_expert_weights(demo_.checkpoint, demo_.config, 1)), bad_(good_) {
    names_.resize(good_.experts.size());
    std::iota(names_.begin(), names_.end(), 100);
  }
  // The self-test's message when the row under test has bad_'s weights.
  std::string verdict() {
    SelfTestReport report;
    const Status status = compare_with_oracle(demo_.plan.moe, bad_, good_, names_, pool_, report);
    EXPECT_EQ(status.ok(), status.code() != StatusCode::kInternal);
    return status.message();
  }

  ThreadPool pool_{2};
  Demo demo_;
  MoeWeightsView good_, bad_;
  std::vector<int64_t> names_;
};

TEST_F(Faults, NoFaultNoFailure) { EXPECT_EQ(verdict(), ""); }

TEST_F(Faults, GateAndUpSwapped) {
  std::swap(bad_.experts[3].gate, bad_.experts[3].up);
  EXPECT_EQ(verdict().find("expert 103 run by "), 0u) << verdict();
}

TEST_F(Faults, AnotherExpertsWeights) {
  bad_.experts[7].down = bad_.experts[8].down;
  EXPECT_EQ(verdict().find("expert 107 run by "), 0u) << verdict();
}

TEST_F(Faults, OneScaleByteOff) {
  const Fp4MatrixView& down = good_.experts[5].down;
  std::vector<uint8_t> scales(down.scales, down.scales + down.rows * (down.cols / 32));
  for (size_t i = 0; i < scales.size(); i += 8) ++scales[i];  // doubles one block in eight
  bad_.experts[5].down.scales = scales.data();
  EXPECT_EQ(verdict().find("expert 105 run by "), 0u) << verdict();
}

TEST_F(Faults, ValuesThatAreNotFiniteNeverPass) {
  const Fp4MatrixView& down = good_.experts[5].down;
  std::vector<uint8_t> scales(static_cast<size_t>(down.rows * (down.cols / 32)), 254);
  bad_.experts[5].down.scales = good_.experts[5].down.scales = scales.data();
  EXPECT_NE(verdict().find("values that are not finite"), std::string::npos) << verdict();
}

// On a GPU, w4a8 has FP8 tokens: the oracle's row for it passes, and rows of other numerics fail.
class Fp8Outputs : public testing::TestWithParam<const char*> {
 protected:
  Fp8Outputs()
      : demo_(demo("full", "ref_fp8", "w4a8", "none", GetParam())),
        weights_(*load_expert_weights(demo_.checkpoint, demo_.config, demo_.config.num_layers - 1)) {
    names_.resize(weights_.experts.size());
    std::iota(names_.begin(), names_.end(), 0);
  }
  // The test's message for a row's output that claims to be w4a8 with FP8 tokens.
  std::string verdict(const char* runner, const Numerics& computed) {
    const auto row = std::find_if(runner_rows().begin(), runner_rows().end(),
                                  [&](const RunnerRow& r) { return std::string(r.name) == runner; });
    const std::vector<float> y = output(*row, computed);
    const Numerics& claimed = demo_.plan.moe.numerics();
    SelfTestReport report;
    return compare_experts(y, output(oracle_row(claimed), claimed), names_, *row, claimed, report).message();
  }

  Demo demo_;
  MoeWeightsView weights_;
  std::vector<int64_t> names_;

 private:
  std::vector<float> output(const RunnerRow& row, const Numerics& numerics) {
    MoeProblem problem = demo_.plan.moe.problem();
    problem.top_k = 1;
    ExpertProbe probe =
        ExpertProbe::make(row, problem, numerics, weights_, {.rows_per_expert = 2}, pool_).value();
    const std::span<const float> y = probe.run(2, pool_).value();
    return {y.begin(), y.end()};
  }
  ThreadPool pool_{2};
};

TEST_P(Fp8Outputs, TheOracleRowPasses) {
  EXPECT_EQ(demo_.plan.moe.numerics(), (Numerics{.scheme = Scheme::kW4A8, .act8 = Act8::kFp8Token}));
  EXPECT_EQ(verdict("ref_fp8", demo_.plan.moe.numerics()), "");
  ThreadPool pool(2);
  const Result<SelfTestReport> report = self_test(demo_.checkpoint, demo_.config, demo_.plan, pool);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report->worst_error, 0);
}

TEST_P(Fp8Outputs, OutputsOfOtherNumericsFail) {
  for (const Scheme scheme : {Scheme::kW4A16, Scheme::kW4A8}) {
    const std::string said = verdict("cpu_scalar", {.scheme = scheme});
    EXPECT_EQ(said.find("expert 0 run by cpu_scalar (w4a8 (FP8 tokens)) differs from the oracle by"), 0u)
        << scheme_name(scheme) << ": " << said;
  }
}

INSTANTIATE_TEST_SUITE_P(Demos, Fp8Outputs, testing::Values(FP4MOE_DEMO_MODEL, FP4MOE_DEMO_NVFP4),
                         [](const auto& p) {
                           return std::string(p.param).find("nvfp4") != std::string::npos ? "nvfp4" : "mxfp4";
                         });

TEST(SelfTest, BudgetsByScheme) {
  EXPECT_EQ(self_test_budget({Scheme::kW4A16}), 3e-3);
  EXPECT_EQ(self_test_budget({Scheme::kW4A8}), 3e-3);
  EXPECT_EQ(self_test_budget({.scheme = Scheme::kW4A8, .act8 = Act8::kFp8Token}), 5e-3);
  EXPECT_EQ(self_test_budget({Scheme::kW4A4}), 2e-2);
}

}  // namespace
}  // namespace fp4moe
