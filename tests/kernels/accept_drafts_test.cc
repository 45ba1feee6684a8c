// The oracle of accepted drafts and of the rows that follow them, on cases computed by hand.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "kernels/ref/drafts_ref.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

using Ids = std::vector<int32_t>;
using Counts = std::pair<int32_t, int32_t>;  // right drafts, and those with an id

// A sequence with three drafts. Negative ids are those of sampled[~id]; the kept ones follow the four tokens.
Counts accept(const Ids& drafts, const Ids& tokens, const Ids& kept = {}) {
  Ids ids = {7}, num_drafts = {3, 0, 0, 0}, moves = {2, 2, 2, 2}, distances(20, -1);
  ids.insert(ids.end(), drafts.begin(), drafts.end());
  std::vector<SampledRow> sampled;
  for (const Ids* some : {&tokens, &kept})
    for (const int32_t id : *some) {
      SampledRow& row = sampled.emplace_back();
      row.status = id < 0 ? SampleStatus::kNoToken : SampleStatus::kOk;
      row.token_id = std::max(id, 0);
    }
  ref::accept_drafts(
      {sampled.data(), nullptr, ids.data(), num_drafts.data(), moves.data(), 4, distances.data(), 10});
  EXPECT_EQ(distances[0], 2);
  EXPECT_EQ(distances[10], sampled[0].num_right);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(sampled[i].num_right + sampled[i].num_drafts, 0);
  return {sampled[0].num_right, sampled[0].num_drafts};
}

TEST(AcceptDrafts, CountsTheLeadingDraftsThatWereSampled) {
  EXPECT_EQ(accept({1, 2, 3}, {9, 2, 3, 4}), Counts(0, 3)) << "the first is wrong, and so are all after it";
  EXPECT_EQ(accept({1, 2, 3}, {1, 9, 3, 4}), Counts(1, 3));
  EXPECT_EQ(accept({1, 2, 3}, {1, 2, 3, 4}), Counts(3, 3));
}

TEST(AcceptDrafts, EndsAtADraftOrARowWithoutAToken) {
  EXPECT_EQ(accept({~4, ~5, 3}, {1, 2, 3, 4}, {1, 2, -1}), Counts(3, 3));
  EXPECT_EQ(accept({~4, ~6, ~5}, {1, 0, 2, 4}, {1, 2, -1}), Counts(1, 1)) << "no id is not token 0";
  EXPECT_EQ(accept({0, 2, 3}, {-1, 2, 3, 4}), Counts(0, 3)) << "a row without a token has not chosen 0";
}

TEST(AcceptDrafts, MovesTheRowsThatFollow) {
  const Ids distances = {5, 2, 0, 3};
  Ids moves = {move_code(3, true), move_code(3, false), 0, move_code(2, true)};
  Ids ids = {~10, ~20, ~30, ~40}, first(4, 100);
  std::vector<int64_t> positions = {100, 101, 102, 103}, features = {0, 1, 2, 3};
  ref::move_rows(
      {distances.data(), moves.data(), ids.data(), positions.data(), first.data(), features.data(), 4});
  EXPECT_EQ(moves, (Ids{3, 3, 0, 0})) << "the distances";
  EXPECT_EQ(ids, (Ids{~13, ~20, ~30, ~40}));
  EXPECT_EQ(first, (Ids{103, 103, 100, 100}));
  EXPECT_EQ(positions, (std::vector<int64_t>{103, 104, 102, 103}));
  EXPECT_EQ(features, (std::vector<int64_t>{3, 1, 2, 3}));
  std::vector<SampleRowParams> params(4);
  for (SampleRowParams& row : params) row.random_state = random_state(/*seed=*/7, /*position=*/10);
  ref::move_randoms({params.data(), moves.data(), 4});
  EXPECT_EQ(params[0].random, random_number(random_state(7, 13)));
  EXPECT_EQ(params[2].random, 0) << "it stays";
}

}  // namespace
}  // namespace fp4moe
