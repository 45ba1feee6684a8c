// Compares the acceptance of drafts on the GPU with the oracle.
#include <algorithm>
#include <random>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/device_drafts.h"
#include "kernels/ref/drafts_ref.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

constexpr int32_t kNone = -1;  // no token

SampledRow row_of(int32_t id) {
  SampledRow row{};
  row.status = id == kNone ? SampleStatus::kNoToken : SampleStatus::kOk;
  row.token_id = std::max(id, 0);
  return row;
}

struct Steps {
  std::vector<int32_t> token_ids, num_drafts, moves;
  std::vector<SampledRow> sampled, kept;

  // Adds a sequence. A draft is known, or kept: then row_of(draft) is one of `kept`.
  void add(const std::vector<int32_t>& tokens, const std::vector<int32_t>& drafts, bool are_kept) {
    token_ids.push_back(3);
    num_drafts.push_back(static_cast<int32_t>(drafts.size()));
    num_drafts.resize(num_drafts.size() + drafts.size());
    for (const int32_t token : tokens) sampled.push_back(row_of(token));
    for (const int32_t draft : drafts) {
      token_ids.push_back(are_kept ? ~static_cast<int32_t>(kept.size()) : draft);
      if (are_kept) kept.push_back(row_of(draft));
    }
    for (size_t i = 0; i < tokens.size(); ++i) moves.push_back(static_cast<int32_t>(moves.size() % 3));
  }

  // Appends the kept rows to the sampled ones.
  void finish() {
    const auto num_rows = static_cast<int32_t>(sampled.size());
    for (int32_t& id : token_ids)
      if (id < 0) id -= num_rows;
    sampled.insert(sampled.end(), kept.begin(), kept.end());
  }

  void compare() const {
    const int64_t num_rows = std::ssize(token_ids), right = num_rows + 5;
    std::vector<SampledRow> expected = sampled;
    std::vector<int32_t> distances(static_cast<size_t>(right + num_rows), -7);
    const DeviceArray<SampledRow> device_sampled(sampled),
        copy(std::vector<SampledRow>(static_cast<size_t>(num_rows)));
    const DeviceArray<int32_t> device_ids(token_ids), device_drafts(num_drafts), device_moves(moves),
        device_distances(distances);
    AcceptDraftsArgs args{expected.data(), nullptr,  token_ids.data(), num_drafts.data(),
                          moves.data(),    num_rows, distances.data(), right};
    ref::accept_drafts(args);
    cuda_accept_drafts()({device_sampled.data(), copy.data(), device_ids.data(), device_drafts.data(),
                          device_moves.data(), num_rows, device_distances.data(), right});
    const Status status = current_stream().synchronize();
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(device_distances.values(), distances);
    const std::vector<SampledRow> actual = device_sampled.values(), copied = copy.values();
    for (size_t row = 0; row < token_ids.size(); ++row) {
      EXPECT_EQ(actual[row].num_right, expected[row].num_right) << row;
      EXPECT_EQ(actual[row].num_drafts, expected[row].num_drafts) << row;
      EXPECT_EQ(copied[row].num_right, expected[row].num_right) << row;
      EXPECT_EQ(copied[row].num_drafts, expected[row].num_drafts) << row;
      EXPECT_EQ(actual[row].token_id, expected[row].token_id) << row;
    }
  }
};

class AcceptDraftsCuda : public testing::Test {
 protected:
  Stream stream_ = Stream::make().value();
  const StreamScope scope_{stream_};
};

// Calls function(ids) for all `count` ids of 0, 1 and kNone.
template <class Function>
void each_ids(size_t count, const Function& function) {
  size_t num_cases = 1;
  for (size_t i = 0; i < count; ++i) num_cases *= 3;
  for (size_t n = 0; n < num_cases; ++n) {
    std::vector<int32_t> ids;
    for (size_t rest = n; ids.size() < count; rest /= 3) ids.push_back(static_cast<int32_t>(rest % 3) - 1);
    function(ids);
  }
}

TEST_F(AcceptDraftsCuda, EqualsTheOracleInEverySmallCase) {
  Steps steps;
  for (size_t num_drafts = 0; num_drafts <= 3; ++num_drafts)
    each_ids(num_drafts + 1, [&](const std::vector<int32_t>& tokens) {
      each_ids(num_drafts, [&](const std::vector<int32_t>& drafts) {
        steps.add(tokens, drafts, /*are_kept=*/true);
        if (std::ranges::find(drafts, kNone) == drafts.end()) steps.add(tokens, drafts, /*are_kept=*/false);
      });
    });
  steps.finish();
  steps.compare();
}

TEST_F(AcceptDraftsCuda, EqualsTheOracleForEveryNumberOfRows) {
  for (const int64_t num_rows : {1, 2, 63, 64, 65, 128, 129, 1000}) {
    Steps steps;
    for (int64_t row = 0; row < num_rows; ++row) steps.add({static_cast<int32_t>(row)}, {}, false);
    steps.finish();
    steps.compare();
  }
}

TEST_F(AcceptDraftsCuda, MovesRowsLikeTheOracle) {
  std::mt19937 random(3);
  for (const size_t num_rows : {1u, 7u, 64u, 65u, 300u})
    for (const bool has_features : {false, true}) {
      std::vector<int32_t> distances, moves, ids, first;
      std::vector<int64_t> positions, features;
      for (size_t i = 0; i < 50; ++i) distances.push_back(static_cast<int32_t>(random() % 6));
      for (size_t row = 0; row < num_rows; ++row) {
        const auto code = static_cast<int32_t>(random() % 102);  // 1 is no code
        moves.push_back(code == 1 ? 0 : code);
        ids.push_back(~static_cast<int32_t>(random() % 1000));
        first.push_back(static_cast<int32_t>(random() % 1000));
        positions.push_back(first.back());
        features.push_back(static_cast<int64_t>(random() % 1000));
      }
      const DeviceArray<int32_t> device_distances(distances), device_moves(moves), device_ids(ids),
          device_first(first);
      const DeviceArray<int64_t> device_positions(positions), device_features(features);
      const auto count = static_cast<int64_t>(num_rows);
      cuda_move_rows()({device_distances.data(), device_moves.data(), device_ids.data(),
                        device_positions.data(), device_first.data(),
                        has_features ? device_features.data() : nullptr, count});
      ref::move_rows({distances.data(), moves.data(), ids.data(), positions.data(), first.data(),
                      has_features ? features.data() : nullptr, count});
      const Status status = current_stream().synchronize();
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(device_moves.values(), moves);
      EXPECT_EQ(device_ids.values(), ids);
      EXPECT_EQ(device_first.values(), first);
      EXPECT_EQ(device_positions.values(), positions);
      EXPECT_EQ(device_features.values(), features);
    }
}

TEST_F(AcceptDraftsCuda, MovesRandomNumbersLikeTheOracle) {
  for (const size_t num_rows : {1u, 64u, 65u, 300u}) {
    std::vector<SampleRowParams> params(num_rows);
    std::vector<int32_t> moves(num_rows);
    for (size_t row = 0; row < num_rows; ++row) {
      params[row].random_state = random_state(row, static_cast<int64_t>(3 * row));
      params[row].random = 0.5;
      moves[row] = static_cast<int32_t>(row % 5);
    }
    const DeviceArray<SampleRowParams> device_params(params);
    const DeviceArray<int32_t> device_moves(moves);
    const auto count = static_cast<int64_t>(num_rows);
    cuda_move_randoms()({device_params.data(), device_moves.data(), count});
    ref::move_randoms({params.data(), moves.data(), count});
    const Status status = stream_.synchronize();
    ASSERT_TRUE(status.ok()) << status.to_string();
    const std::vector<SampleRowParams> actual = device_params.values();
    for (size_t row = 0; row < num_rows; ++row) EXPECT_EQ(actual[row].random, params[row].random) << row;
  }
}

}  // namespace
}  // namespace fp4moe
