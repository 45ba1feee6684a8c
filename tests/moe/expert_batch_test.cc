// Tests moe_sort(): rows grouped by expert, mutually inverse maps, and edge cases.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "moe/expert_batch.h"

namespace fp4moe {
namespace {

struct Sorted {
  std::vector<int64_t> offsets;
  std::vector<int32_t> slot_of_row, row_of_slot;
};

Sorted sort(const std::vector<int32_t>& ids, int64_t num_experts, int64_t first_expert = 0) {
  const auto slots = static_cast<int64_t>(ids.size());
  Sorted s{std::vector<int64_t>(static_cast<size_t>(num_experts + 1), -7),
           std::vector<int32_t>(ids.size(), -7), std::vector<int32_t>(ids.size(), -7)};
  moe_sort({ids.data(), slots, first_expert, num_experts, s.offsets.data(), s.slot_of_row.data(),
            s.row_of_slot.data()});
  return s;
}

TEST(MoeSortTest, NoTokens) { EXPECT_EQ(sort({}, 3).offsets, (std::vector<int64_t>{0, 0, 0, 0})); }

TEST(MoeSortTest, GroupsByExpertAndKeepsTheOrderOfSlots) {
  const Sorted s = sort({2, 0, 2, 1, 0, 2}, 4);
  EXPECT_EQ(s.offsets, (std::vector<int64_t>{0, 2, 3, 6, 6}));
  EXPECT_EQ(s.slot_of_row, (std::vector<int32_t>{1, 4, 3, 0, 2, 5}));
  EXPECT_EQ(s.row_of_slot, (std::vector<int32_t>{3, 0, 4, 2, 1, 5}));
}

TEST(MoeSortTest, AllToOneExpert) {
  const Sorted s = sort({1, 1, 1}, 3);
  EXPECT_EQ(s.offsets, (std::vector<int64_t>{0, 0, 3, 3}));
  EXPECT_EQ(s.slot_of_row, (std::vector<int32_t>{0, 1, 2}));
}

TEST(MoeSortTest, DropsMaskedAndNonLocalIds) {
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min(), kMax = std::numeric_limits<int32_t>::max();
  const Sorted s = sort({-1, 4, 3, kMax, 5, kMin, 6}, 2, 4);  // local experts are 4 and 5
  EXPECT_EQ(s.offsets, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(s.row_of_slot, (std::vector<int32_t>{-1, 0, -1, -1, 1, -1, -1}));
  EXPECT_EQ(s.slot_of_row, (std::vector<int32_t>{1, 4, -7, -7, -7, -7, -7}));  // the rest is not written
}

TEST(MoeSortTest, AnExpertNamedTwiceGetsTwoRows) {
  const Sorted s = sort({3, 3}, 4);
  EXPECT_EQ(s.offsets, (std::vector<int64_t>{0, 0, 0, 0, 2}));
  EXPECT_EQ(s.row_of_slot, (std::vector<int32_t>{0, 1}));
}

RC_GTEST_PROP(MoeSortTest, EverySlotOfALocalExpertHasItsRow, ()) {
  const auto ids = *rc::gen::container<std::vector<int32_t>>(rc::gen::inRange(-2, 12));
  const Sorted s = sort(ids, 8, 1);
  int64_t local = 0;
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    const int64_t e = ids[slot] - 1;
    if (e < 0 || e >= 8) {
      RC_ASSERT(s.row_of_slot[slot] == -1);
      continue;
    }
    ++local;
    const int32_t row = s.row_of_slot[slot];
    RC_ASSERT(row >= s.offsets[static_cast<size_t>(e)] && row < s.offsets[static_cast<size_t>(e) + 1]);
    RC_ASSERT(s.slot_of_row[static_cast<size_t>(row)] == static_cast<int32_t>(slot));
  }
  RC_ASSERT(s.offsets.back() == local);
}

}  // namespace
}  // namespace fp4moe
