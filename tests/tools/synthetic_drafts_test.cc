#include "bench/synthetic_drafts.h"

#include <gtest/gtest.h>

#include <vector>

namespace fp4moe {
namespace {

using Ids = std::vector<int32_t>;

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(SyntheticDrafts, ContinueTheRecordedOutput) {
  SyntheticDrafts drafts(1);
  drafts.start_case(2);
  EXPECT_EQ(drafts.draft(Ids{5, 6}, 3), Ids());
  drafts.record(Ids{5, 6}, {1, 2, 3, 4});
  EXPECT_EQ(drafts.draft(Ids{5, 6}, 3), (Ids{1, 2, 3}));
  EXPECT_EQ(drafts.draft(Ids{5, 6, 1, 2}, 3), (Ids{3, 4}));
  EXPECT_EQ(drafts.draft(Ids{5, 6, 1, 9}, 3), (Ids{3, 4})) << "by position: the output may differ by now";
  EXPECT_EQ(drafts.draft(Ids{5, 6, 1, 2, 3, 4}, 3), Ids());
  EXPECT_EQ(drafts.draft(Ids{5, 7}, 3), Ids());
  EXPECT_EQ(drafts.draft(Ids{5}, 3), Ids());
  drafts.record(Ids{5, 6}, {8});
  EXPECT_EQ(drafts.source()(Ids{5, 6}, 3), Ids{8});
  drafts.start_case(1);
  EXPECT_EQ(drafts.draft(Ids{5, 6}, 3), Ids());
}

TEST(SyntheticDrafts, NoneIsRightAtZero) {
  SyntheticDrafts drafts(0);
  drafts.start_case(1);
  drafts.record(Ids{5}, {0, 1, 2});
  EXPECT_EQ(drafts.draft(Ids{5}, 3), (Ids{1, 0, 1}));
}

// Decodes with 3 drafts a step and counts, for each place in a draft, how often it was reached and right.
TEST(SyntheticDrafts, AreRightAsOftenAsTheyShould) {
  constexpr size_t kLength = 6000;
  Ids output(kLength);
  for (size_t i = 0; i < kLength; ++i) output[i] = static_cast<int32_t>(i * i % 1009);
  for (const double acceptance : {0.3, 0.8, 0.95}) {
    SyntheticDrafts drafts(acceptance);
    drafts.start_case(1);
    drafts.record(Ids{5}, output);
    Ids first_runs[2];
    for (Ids& first : first_runs) {
      drafts.start_run();
      double reached[3] = {}, right[3] = {};
      for (size_t at = 0; at + 4 < kLength;) {
        const Ids so_far(output.begin(), output.begin() + static_cast<std::ptrdiff_t>(at));
        const Ids ids = drafts.draft(joined({5}, so_far), 3);
        size_t kept = 0;
        for (; kept < ids.size(); ++kept) {
          ++reached[kept];
          if (ids[kept] != output[at + kept]) break;
          ++right[kept];
        }
        if (at < 40) first.insert(first.end(), ids.begin(), ids.end());
        at += kept + 1;
      }
      for (size_t i = 0; i < 3; ++i)
        if (reached[i] > 400) {
          EXPECT_NEAR(right[i] / reached[i], acceptance, 0.06) << "place " << i;
        }
    }
    EXPECT_NE(first_runs[0], first_runs[1]) << "each run draws anew";
  }
}

}  // namespace
}  // namespace fp4moe
