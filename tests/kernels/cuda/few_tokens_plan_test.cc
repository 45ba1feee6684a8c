// How the few-token layer cuts its work and lays out rows.
#include "kernels/cuda/few_tokens_plan.h"

#include <gtest/gtest.h>

#include <set>

namespace fp4moe {
namespace {

TEST(FewStripesTest, CoverAllTilesAndKnowTheirOwners) {
  for (int total : {1, 2, 65, 131, 132, 133, 360, 7168, 640'000})
    for (int ctas : {64, 114, 132, 160}) {
      const FewStripes stripes(total, ctas);
      EXPECT_EQ(stripes.begin(0), 0);
      EXPECT_EQ(stripes.begin(ctas), total);
      for (int c = 0; c < ctas; ++c) {
        const int begin = stripes.begin(c), end = stripes.begin(c + 1), size = end - begin;
        EXPECT_GE(size, c < total ? total / ctas : 0);
        EXPECT_LE(size, (total + ctas - 1) / ctas);
        if (size > 0) {
          EXPECT_EQ(stripes.owner(begin), c);
          EXPECT_EQ(stripes.owner(end - 1), c);
        }
      }
    }
}

TEST(FewStripesTest, NoneIsEmptyBetweenOthers) {
  const FewStripes stripes(49, 132);
  for (int c = 0; c < 132; ++c) EXPECT_EQ(stripes.begin(c + 1) - stripes.begin(c), c < 49 ? 1 : 0);
}

TEST(FewStripesTest, NothingToDo) {
  const FewStripes stripes(0, 132);
  EXPECT_EQ(stripes.begin(0), 0);
  EXPECT_EQ(stripes.begin(132), 0);
}

TEST(FewActOffsetTest, EveryElementHasItsOwnPlace) {
  constexpr int kRowBytes = 3 * kFewTileBytesOfRow;
  std::set<int> places;
  for (int row = 0; row < 5; ++row)
    for (int c = 0; c < 192; ++c) {
      const int at = few_act_offset(row, kRowBytes, c);
      EXPECT_EQ(at / kRowBytes, row);
      EXPECT_EQ(at % kRowBytes / kFewTileBytesOfRow, c / 64);
      EXPECT_TRUE(places.insert(at).second);
    }
  EXPECT_EQ(places.size(), 5u * 192u);
}

// What lane q of a B fragment reads as 16 bytes: columns 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of two k steps.
TEST(FewActOffsetTest, AFragmentIsContiguous) {
  for (int row : {0, 1})
    for (int half : {0, 1})
      for (int q = 0; q < 4; ++q) {
        const int start = few_act_offset(row, 256, half * 32 + 2 * q);
        EXPECT_EQ(start % 16, 0);
        for (int step : {0, 1})
          for (int part : {0, 1})
            EXPECT_EQ(few_act_offset(row, 256, half * 32 + step * 16 + part * 8 + 2 * q),
                      start + step * 8 + part * 4);
      }
}

TEST(FewPlanTest, SharedMemoryHoldsTheRowsOfBothPhases) {
  TiledExperts experts;
  experts.hidden_size = 7168, experts.intermediate_size = 2048;
  const FewPlan one = few_plan(experts, 1, 8, 132, 200'000), eight = few_plan(experts, 8, 8, 132, 200'000);
  EXPECT_EQ(one.up.row_blocks, 64);
  EXPECT_EQ(one.up.k_tiles, 112);
  EXPECT_EQ(one.down.row_blocks, 112);
  EXPECT_EQ(one.down.k_tiles, 32);
  EXPECT_EQ(one.act_bytes, 7168 * 2);
  EXPECT_EQ(eight.act_bytes, 8 * 7168 * 2);
  EXPECT_LE(eight.act_bytes + eight.num_stages * eight.stage_bytes, 200'000);
  EXPECT_LE(one.num_stages, kFewMaxStages);
  for (int64_t tokens = 1; tokens <= kFewMaxTokens; ++tokens)  // one lane and one group for each stage
    EXPECT_EQ(few_plan(experts, tokens, 8, 132, 200'000).num_stages % 12, 0) << tokens;
  experts.hidden_size = 64;
  EXPECT_EQ(few_plan(experts, 8, 8, 132, 200'000).act_bytes, 16 * 2048 * 2);
}

}  // namespace
}  // namespace fp4moe
