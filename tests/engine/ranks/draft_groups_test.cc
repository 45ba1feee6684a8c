// The demos' trained draft models on ranks of a CPU: several groups, some without rows, against one rank.
#include <gtest/gtest.h>

#include "engine/ranks/drafting.h"

namespace fp4moe {
namespace {

EngineConfig on_cpu(const DraftLayout& layout) {
  EngineConfig flags = flags_of(layout);
  flags.device = "cpu";
  flags.threads = 2;
  flags.enable_deterministic_inference = true;
  return flags;
}

class DraftGroups : public testing::TestWithParam<TrainedDraft> {};
INSTANTIATE_TEST_SUITE_P(Demos, DraftGroups, testing::ValuesIn(kTrainedDrafts), trained_name);

TEST_P(DraftGroups, DeterministicRanksHaveTheBitsOfOne) {
  for (const DraftLayout& layout : kDraftLayouts) {
    const Drafts one = Drafting(GetParam(), on_cpu({.a2a = layout.a2a})).run();
    const Drafts several = Drafting(GetParam(), on_cpu(layout)).run();
    ASSERT_EQ(one.logits.size(), Drafting::kRunRows);
    EXPECT_TRUE(several.logits == one.logits) << layout.text();
    EXPECT_EQ(several.ids, one.ids) << layout.text();
  }
}

}  // namespace
}  // namespace fp4moe
