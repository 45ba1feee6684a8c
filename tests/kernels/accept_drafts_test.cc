// The oracle of accepted drafts and of the rows that follow them, on cases computed by hand.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/ref/drafts_ref.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

SampledRow row_of(int32_t id) {
  SampledRow row;
  row.token_id = id;
  if (id < 0) row.status = SampleStatus::kNoToken, row.token_id = 0;
  return row;
}

// A step of one sequence with three drafts, whose ids are known or, if negative, those of sampled[~id].
struct Step {
  std::vector<int32_t> token_ids, num_drafts = {3, 0, 0, 0}, moves = {0, 0, 0, 0}, distances;
  std::vector<SampledRow> sampled, copy;

  Step(std::vector<int32_t> drafts, const std::vector<int32_t>& tokens, const std::vector<int32_t>& kept = {})
      : token_ids({7}), distances(20, -1), copy(4) {
    token_ids.insert(token_ids.end(), drafts.begin(), drafts.end());
    for (const auto* ids : {&tokens, &kept})
      for (const int32_t id : *ids) sampled.push_back(row_of(id));
    ref::accept_drafts({.sampled = sampled.data(),
                        .copy = copy.data(),
                        .token_ids = token_ids.data(),
                        .num_drafts = num_drafts.data(),
                        .moves = moves.data(),
                        .num_rows = 4,
                        .distances = distances.data(),
                        .right = 10});
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(copy[i].num_right, sampled[i].num_right);
      EXPECT_EQ(copy[i].num_drafts, sampled[i].num_drafts);
      EXPECT_EQ(distances[10 + i], sampled[i].num_right);
      EXPECT_EQ(distances[i], 0);
      EXPECT_TRUE(i == 0 || sampled[i].num_right + sampled[i].num_drafts == 0) << "a row of a draft";
    }
  }
  int32_t num_right() const { return sampled[0].num_right; }
  int32_t num_with_ids() const { return sampled[0].num_drafts; }
};

TEST(AcceptDrafts, CountsTheLeadingDraftsThatWereSampled) {
  EXPECT_EQ(Step({1, 2, 3}, {9, 2, 3, 4}).num_right(), 0) << "the first is wrong, and so are all after it";
  EXPECT_EQ(Step({1, 2, 3}, {1, 9, 3, 4}).num_right(), 1);
  EXPECT_EQ(Step({1, 2, 3}, {1, 2, 9, 4}).num_right(), 2);
  EXPECT_EQ(Step({1, 2, 3}, {1, 2, 3, 4}).num_right(), 3);
  EXPECT_EQ(Step({1, 2, 3}, {1, 2, 3, 4}).num_with_ids(), 3);
}

TEST(AcceptDrafts, EndsAtADraftOrARowWithoutAToken) {
  const std::vector<int32_t> kept = {1, 2, -1};  // sampled[4] to sampled[6]
  EXPECT_EQ(Step({~4, ~5, 3}, {1, 2, 3, 4}, kept).num_right(), 3);
  const Step ends({~4, ~6, ~5}, {1, 0, 2, 4}, kept);
  EXPECT_EQ(ends.num_right(), 1) << "a draft without an id is not token 0";
  EXPECT_EQ(ends.num_with_ids(), 1);
  const Step failed({0, 2, 3}, {-1, 2, 3, 4});
  EXPECT_EQ(failed.num_right(), 0) << "a row without a token has not chosen token 0";
  EXPECT_EQ(failed.num_with_ids(), 3);
}

TEST(MoveRows, AddsTheDistanceOfARow) {
  std::vector<int32_t> distances = {5, 2, 0, 3};
  std::vector<int32_t> moves = {move_code(3, true), move_code(3, false), 0, move_code(2, true)};
  std::vector<int32_t> ids = {~10, ~20, ~30, ~40}, first(4, 100);
  std::vector<int64_t> positions = {100, 101, 102, 103}, features = {0, 1, 2, 3};
  ref::move_rows({distances.data(), moves.data(), ids.data(), positions.data(), first.data(), features.data(),
                  /*num_rows=*/4});
  EXPECT_EQ(moves, (std::vector<int32_t>{3, 3, 0, 0})) << "the distances";
  EXPECT_EQ(ids, (std::vector<int32_t>{~13, ~20, ~30, ~40}));
  EXPECT_EQ(first, (std::vector<int32_t>{103, 103, 100, 100}));
  EXPECT_EQ(positions, (std::vector<int64_t>{103, 104, 102, 103}));
  EXPECT_EQ(features, (std::vector<int64_t>{3, 1, 2, 3}));
}

TEST(MoveRandoms, AreThoseOfThePositions) {
  std::vector<SampleRowParams> params(3);
  for (size_t i = 0; i < 3; ++i) {
    params[i].random_state = random_state(/*seed=*/7, /*position=*/10);
    params[i].random = 0.25;
  }
  const std::vector<int32_t> moves = {0, 1, 3};
  ref::move_randoms({params.data(), moves.data(), /*num_rows=*/3});
  EXPECT_EQ(params[0].random, 0.25) << "it stays";
  EXPECT_EQ(params[1].random, random_number(random_state(7, 11)));
  EXPECT_EQ(params[2].random, random_number(random_state(7, 13)));
}

// The rows that extend a moved step are those of the step; the rows of the next step follow its right drafts.
TEST(MoveRows, LeavesTheDistanceForTheStepsOwnRows) {
  Step step({1, 2, 3}, {1, 2, 9, 4});
  step.moves = {4, 4, 4, 4};  // as move_rows leaves them
  ref::accept_drafts({.sampled = step.sampled.data(),
                      .token_ids = step.token_ids.data(),
                      .num_drafts = step.num_drafts.data(),
                      .moves = step.moves.data(),
                      .num_rows = 4,
                      .distances = step.distances.data(),
                      .right = 10});
  std::vector<int32_t> moves = {move_code(0, false), move_code(10, false)}, ids = {~0, ~1}, first = {50, 51};
  std::vector<int64_t> positions = {50, 51};
  ref::move_rows({step.distances.data(), moves.data(), ids.data(), positions.data(), first.data(), nullptr,
                  /*num_rows=*/2});
  EXPECT_EQ(positions, (std::vector<int64_t>{54, 53}));
  EXPECT_EQ(ids, (std::vector<int32_t>{~0, ~1}));
}

}  // namespace
}  // namespace fp4moe
