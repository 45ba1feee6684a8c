// Tests how the few-token layer divides its work and lays out rows.
#include "kernels/cuda/experts/few_tokens_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>

namespace fp4moe {
namespace {

TEST(FewCutTest, PartsAreEqualToOne) {
  for (int total : {0, 1, 2, 65, 131, 132, 133, 360, 7168, 64 * 4 * 448})
    for (int parts : {19, 64, 114, 132, 160}) {
      EXPECT_EQ(few_cut(total, 0, parts), 0);
      EXPECT_EQ(few_cut(total, parts, parts), total);
      for (int p = 0; p < parts; ++p) {
        const int size = few_cut(total, p + 1, parts) - few_cut(total, p, parts);
        EXPECT_GE(size, total / parts);
        EXPECT_LE(size, (total + parts - 1) / parts);
      }
    }
}

TEST(FewDivisorTest, EqualsADivision) {
  for (int d : {1, 2, 3, 4, 15, 16, 45, 128, 131, 132, 133, 360, 448, 1024, 4095, 65535}) {
    const FewDivisor by(d);
    const int64_t most =
        std::min<int64_t>(d == 1 ? INT32_MAX : ((int64_t{1} << 32) - 1) / (d - 1), INT32_MAX);
    for (int64_t multiple = 0; multiple <= most; multiple += std::max<int64_t>(d, most / 5000 / d * d))
      for (int64_t n : {multiple - 1, multiple, multiple + 1, multiple + d - 1})
        if (n >= 0 && n <= most) {
          ASSERT_EQ(static_cast<int>(n) / by, n / d) << n << " / " << d;
        }
    ASSERT_EQ(static_cast<int>(most) / by, most / d) << d;
  }
}

// All cuts of a layer's strips and outputs, with the largest sizes.
TEST(FewDivisorTest, CutsAsADivisionDoes) {
  for (int ctas : {64, 114, 132, 160})
    for (int total : {1, 131, 64 * 4 * 448, 8 * 16384 / 2})
      for (int part = 0; part <= ctas; ++part)
        ASSERT_EQ(few_cut(total, part, FewDivisor(ctas)), few_cut(total, part, ctas));
}

// A CTA in few_tokens.cu has room for the rows of at most two experts.
TEST(FewCutTest, StripsOfACtaAreOfTwoExpertsAtMost) {
  for (int strips : {4, 8, 180, 448})
    for (int experts = 1; experts <= kFewMaxPairs; ++experts)
      for (int ctas : {kFewMaxPairs, 132})
        for (int c = 0; c < ctas; ++c) {
          const int begin = few_cut(experts * strips, c, ctas), end = few_cut(experts * strips, c + 1, ctas);
          if (begin < end) {
            EXPECT_LE((end - 1) / strips - begin / strips, 1);
          }
        }
}

TEST(FewActTest, EveryPairHasItsOwnPlace) {
  constexpr int kRowBytes = 4 * 128;
  std::set<int> places;
  for (int row = 0; row < 5; ++row)
    for (int c = 0; c < 256; c += 2) {
      const int at = few_act_offset(row, kRowBytes, few_act_word(c));
      EXPECT_EQ(at / kRowBytes, row);
      EXPECT_EQ(at % kRowBytes / 128, c / 64);
      EXPECT_TRUE(places.insert(at).second);
    }
  EXPECT_EQ(places.size(), 5u * 128u);
}

// Lane q reads 16 bytes of a B fragment: columns 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of two k steps.
TEST(FewActTest, AFragmentIsContiguous) {
  for (int row : {0, 1})
    for (int half : {0, 1})
      for (int q = 0; q < 4; ++q) {
        const int start = few_act_offset(row, 256, few_act_word(half * 32 + 2 * q));
        EXPECT_EQ(start % 16, 0);
        for (int step : {0, 1})
          for (int part : {0, 1})
            EXPECT_EQ(few_act_offset(row, 256, few_act_word(half * 32 + step * 16 + part * 8 + 2 * q)),
                      start + step * 8 + part * 4);
      }
}

TEST(FewPlanTest, SharedMemoryHoldsTheRowsOfBothPhases) {
  TiledExperts experts;
  experts.hidden_size = 7168, experts.intermediate_size = 2048;
  const FewPlan one = few_plan(experts, 1, 8, 132, 200'000), eight = few_plan(experts, 8, 8, 132, 200'000);
  EXPECT_EQ(one.up.strips, 256);
  EXPECT_EQ(one.up.k_tiles, 112);
  EXPECT_EQ(one.down.strips, 448);
  EXPECT_EQ(one.down.k_tiles, 32);
  EXPECT_EQ(one.act_bytes, 7168 * 2);
  EXPECT_EQ(one.depth, kFewMaxDepth);
  EXPECT_EQ(eight.act_bytes, 8 * 7168 * 2);
  EXPECT_LE(eight.act_bytes + eight.depth * kFewWarps * few_slot_bytes(experts.format), 200'000);
  experts.hidden_size = 64;
  EXPECT_EQ(few_plan(experts, 8, 8, 132, 200'000).act_bytes, 16 * 2048 * 2);
  experts.intermediate_size = 2080;  // 33 tiles, 17 steps
  EXPECT_EQ(few_plan(experts, 8, 8, 132, 200'000).act_bytes, 16 * 17 * 256);
}

}  // namespace
}  // namespace fp4moe
