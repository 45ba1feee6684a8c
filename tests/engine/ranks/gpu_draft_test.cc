// The demos' trained draft models on a GPU, pass by pass: their logits against the reference runner's, and
// the ids chosen on the device; recorded passes against launched ones, several ranks against one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/device_info.h"
#include "engine/ranks/drafting.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "4", 0);
  return true;
}();

EngineConfig on_gpu(bool graphs, bool deterministic = false, const DraftLayout& layout = {}) {
  EngineConfig flags = flags_of(layout);
  flags.device = "cuda";
  flags.disable_cuda_graph = !graphs;
  flags.enable_deterministic_inference = deterministic;
  flags.comm_timeout = 20;
  return flags;
}

bool has_ranks(const DraftLayout& layout) { return device_info(gpu_of_rank(layout.tp - 1)).ok(); }

// One group, groups of one rank and of two, and a group without sequences.
constexpr DraftLayout kKeepingLayouts[] = {{1, 1, 1}, {2, 1, 1}, {2, 1, 2}, {4, 4, 2, "deepep"}, {4, 1, 4}};

class GpuDrafts : public testing::TestWithParam<TrainedDraft> {};
INSTANTIATE_TEST_SUITE_P(Demos, GpuDrafts, testing::ValuesIn(kTrainedDrafts), trained_name);

// In bf16 a token can go to another expert, which changes its row and, through attention, later ones.
TEST_P(GpuDrafts, AreNearThoseOfTheReferenceRunner) {
  EngineConfig reference;
  reference.device = "cpu";
  reference.dtype = "float32";
  reference.moe_runner_backend = "ref";
  const Drafts expected = Drafting(GetParam(), reference).run();
  const Drafts actual = Drafting(GetParam(), on_gpu(true)).run();
  ASSERT_EQ(actual.logits.size(), expected.logits.size());
  ASSERT_EQ(actual.logits.size(), Drafting::kRunRows);
  std::vector<double> errors;
  int num_equal = 0;
  for (size_t i = 0; i < expected.logits.size(); ++i) {
    errors.push_back(relative_l2(actual.logits[i], expected.logits[i]));
    num_equal += actual.ids[i] == expected.ids[i];
  }
  std::ranges::sort(errors);
  std::printf("median error %.4f, largest %.4f, %d of %zu ids equal\n", errors[errors.size() / 2],
              errors.back(), num_equal, errors.size());
  EXPECT_LT(errors[errors.size() / 2], 3e-2);
  EXPECT_GT(errors[0], 1e-6) << "bf16 cannot be this close";
  EXPECT_GT(num_equal, 57) << "of 72";
}

TEST_P(GpuDrafts, RecordedPassesHaveTheBitsOfLaunchedOnes) {
  for (const bool deterministic : {false, true}) {
    const Drafts recorded = Drafting(GetParam(), on_gpu(true, deterministic)).run();
    const Drafts launched = Drafting(GetParam(), on_gpu(false, deterministic)).run();
    EXPECT_EQ(recorded.logits, launched.logits) << deterministic;
    EXPECT_EQ(recorded.ids, launched.ids) << deterministic;
  }
}

// Drafts that stay on the device are read there by later passes and by the step that verifies them.
TEST_P(GpuDrafts, ThatStayHaveTheBitsOfKnownOnes) {
  for (const DraftLayout& layout : kKeepingLayouts)
    for (const bool graphs : {true, false}) {
      if (!has_ranks(layout)) continue;
      const Drafts known = Drafting(GetParam(), on_gpu(graphs, false, layout)).chain(/*stay=*/false);
      const Drafts kept = Drafting(GetParam(), on_gpu(graphs, false, layout)).chain(/*stay=*/true);
      EXPECT_EQ(known.logits.size(), 3u * 3u + 3u * 4u);
      EXPECT_EQ(kept.logits, known.logits) << layout.text() << ", graphs " << graphs;
      EXPECT_EQ(kept.ids, known.ids) << layout.text() << ", graphs " << graphs;
      EXPECT_EQ(known.ids.size(), 9u);
      EXPECT_GE(std::ranges::min(known.ids), 0);
    }
}

TEST_P(GpuDrafts, OfTokensThatStayHaveTheBitsOfKnownOnes) {
  for (const DraftLayout& layout : kKeepingLayouts)
    for (const bool graphs : {true, false}) {
      if (!has_ranks(layout)) continue;
      const Drafts known = Drafting(GetParam(), on_gpu(graphs, false, layout)).extend(/*ahead=*/false);
      const Drafts ahead = Drafting(GetParam(), on_gpu(graphs, false, layout)).extend(/*ahead=*/true);
      EXPECT_EQ(known.logits.size(), 6u);
      EXPECT_EQ(ahead.logits, known.logits) << layout.text() << ", graphs " << graphs;
      EXPECT_EQ(ahead.ids, known.ids) << layout.text() << ", graphs " << graphs;
      EXPECT_EQ(known.ids.size(), 12u);
    }
}

TEST_P(GpuDrafts, DeterministicRanksHaveTheBitsOfOne) {
  const Drafts one = Drafting(GetParam(), on_gpu(true, true)).run();
  EXPECT_EQ(one.logits.size(), Drafting::kRunRows);
  for (const DraftLayout& layout : kDraftLayouts) {
    if (!has_ranks(layout)) continue;
    for (const bool graphs : {true, false}) {
      const Drafts several = Drafting(GetParam(), on_gpu(graphs, true, layout)).run();
      EXPECT_TRUE(several.logits == one.logits) << layout.text() << ", graphs " << graphs;
      EXPECT_EQ(several.ids, one.ids) << layout.text() << ", graphs " << graphs;
    }
  }
}

}  // namespace
}  // namespace fp4moe
