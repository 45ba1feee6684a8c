// Tests resolve_scales(): activation scales and alphas for each choice. Scalar scales cover all experts.
#include "moe/act_scales.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

constexpr auto kScalar = ActScaleChoice::kScalar, kPerExpert = ActScaleChoice::kPerExpert,
               kPerToken = ActScaleChoice::kPerToken;

// Scales are powers of two, so that products and reciprocals are exact. Expert 2 has the largest a1 (in its
// up half), expert 0 the largest a2.
std::vector<ExpertWeightsView> experts() {
  std::vector<ExpertWeightsView> all(4);
  const float gate_in[] = {0.25f, 0.5f, 0.125f, 0.25f}, up_in[] = {0.25f, 0.5f, 2, 0.25f};
  const float down_in[] = {4, 0.5f, 1, 2};
  for (size_t e = 0; e < 4; ++e) {
    ExpertWeightsView& w = all[e];
    w.gate.rows = w.up.rows = w.down.rows = 16;
    w.gate.tensor_scale = 8;
    w.up.tensor_scale = 16;
    w.down.tensor_scale = 32;
    w.gate_input_scale = gate_in[e];
    w.up_input_scale = up_in[e];
    w.down_input_scale = down_in[e];
  }
  return all;
}

TEST(ActScalesTest, ScalarsAreOverAllExpertsAndHalvesOnEveryRank) {
  const Numerics n = {Scheme::kW4A4, kScalar, kScalar};
  for (Shard local : {Shard{0, 4}, Shard{0, 2}, Shard{3, 1}}) {
    const std::vector<ExpertScales> scales = resolve_scales(experts(), n, local);
    ASSERT_EQ(static_cast<int64_t>(scales.size()), local.count);
    for (const ExpertScales& s : scales) {
      EXPECT_EQ(s.a1.value, 0.5f);  // encode: 1 / 2
      EXPECT_EQ(s.a2.value, 0.25f);
      EXPECT_EQ(s.gate, 8 * 2);  // each half keeps its weight scale
      EXPECT_EQ(s.up, 16 * 2);
      EXPECT_EQ(s.down, 32 * 4);
    }
  }
}

TEST(ActScalesTest, PerExpertScalesAreSlicedWithTheExperts) {
  const std::vector<ExpertScales> scales =
      resolve_scales(experts(), {Scheme::kW4A4, kPerExpert, kPerExpert}, {1, 2});
  ASSERT_EQ(scales.size(), 2u);
  EXPECT_EQ(scales[0].a1.value, 2.0f);
  EXPECT_EQ(scales[0].gate, 8 * 0.5f);
  EXPECT_EQ(scales[0].down, 32 * 0.5f);
  EXPECT_EQ(scales[1].a1.value, 0.5f);
  EXPECT_EQ(scales[1].up, 16 * 2);
  EXPECT_EQ(scales[1].a2.value, 1.0f);
}

TEST(ActScalesTest, MaskedNumericsMixAScalarA1WithPerExpertA2) {
  const std::vector<ExpertScales> scales =
      resolve_scales(experts(), {Scheme::kW4A4, kScalar, kPerExpert}, {0, 4});
  for (size_t e = 0; e < 4; ++e) {
    EXPECT_EQ(scales[e].a1.value, 0.5f);
    EXPECT_EQ(scales[e].gate, 8 * 2);
    EXPECT_EQ(scales[e].down, 32 * experts()[e].down_input_scale);
    EXPECT_EQ(scales[e].a2.value, 1 / experts()[e].down_input_scale);
  }
}

// For every choice, quantising with the scale and multiplying by alpha restores the weight's scale.
TEST(ActScalesTest, ScaleAndAlphaComeFromTheSameChoice) {
  for (ActScaleChoice a1 : {kScalar, kPerExpert, kPerToken})
    for (ActScaleChoice a2 : {kScalar, kPerExpert, kPerToken})
      for (const ExpertScales& s : resolve_scales(experts(), {Scheme::kW4A4, a1, a2}, {0, 4})) {
        EXPECT_EQ(s.gate * s.a1.value, 8);
        EXPECT_EQ(s.up * s.a1.value, 16);
        EXPECT_EQ(s.down * s.a2.value, 32);
      }
}

TEST(ActScalesTest, OtherSchemesAndPerTokenScalesUseNoneOfTheCheckpoint) {
  for (const Numerics& n :
       {Numerics{}, Numerics{Scheme::kW4A8}, Numerics{Scheme::kW4A4, kPerToken, kPerToken}}) {
    const ExpertScales s = resolve_scales(experts(), n, {2, 1}).front();
    EXPECT_EQ(s.a1.value, 1);
    EXPECT_EQ(s.a2.value, 1);
    EXPECT_EQ(s.gate, 8);
    EXPECT_EQ(s.down, 32);
  }
}

TEST(ActScalesTest, MissingInputScalesAreOne) {
  std::vector<ExpertWeightsView> none(2);
  for (ExpertWeightsView& w : none) w.gate.rows = 16;
  const ExpertScales s = resolve_scales(none, {Scheme::kW4A4, kScalar, kScalar}, {0, 2}).front();
  EXPECT_EQ(s.a1.value, 1);
  EXPECT_EQ(s.a2.value, 1);
}

TEST(ActScalesTest, AnAbsentGateHasNoSay) {
  std::vector<ExpertWeightsView> all = experts();
  for (ExpertWeightsView& w : all) {
    w.gate = {};
    w.gate_input_scale = 1024;
  }
  EXPECT_EQ(resolve_scales(all, {Scheme::kW4A4, kScalar, kScalar}, {0, 4}).front().a1.value, 0.5f);
}

}  // namespace
}  // namespace fp4moe
