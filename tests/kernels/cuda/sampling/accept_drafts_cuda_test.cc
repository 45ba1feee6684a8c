// Compares the kernels of accepted drafts with the oracle.
#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/ref/drafts_ref.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

using Ids = std::vector<int32_t>;

class AcceptDraftsCuda : public testing::Test {
 protected:
  void wait() {
    const Status status = stream_.synchronize();
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  Stream stream_ = Stream::make().value();
  const StreamScope scope_{stream_};
};

// Calls function(ids) for all `count` ids of 0, 1 and -1, which is no token.
template <class Function>
void each_ids(size_t count, const Function& function) {
  size_t num_cases = 1;
  for (size_t i = 0; i < count; ++i) num_cases *= 3;
  for (size_t n = 0; n < num_cases; ++n) {
    Ids ids;
    for (size_t rest = n; ids.size() < count; rest /= 3) ids.push_back(static_cast<int32_t>(rest % 3) - 1);
    function(ids);
  }
}

SampledRow row_of(int32_t id) {
  SampledRow row{};
  row.status = id < 0 ? SampleStatus::kNoToken : SampleStatus::kOk;
  row.token_id = std::max(id, 0);
  return row;
}

// Sequences with up to three drafts, whose ids are known or kept after the step's rows.
TEST_F(AcceptDraftsCuda, EqualsTheOracleInEverySmallCase) {
  Ids ids, num_drafts, moves;
  std::vector<SampledRow> sampled, kept;
  for (size_t count = 0; count <= 3; ++count)
    each_ids(2 * count + 1, [&](const Ids& both) {
      const std::span<const int32_t> tokens = std::span(both).first(count + 1);
      const std::span<const int32_t> drafts = std::span(both).subspan(count + 1);
      for (const bool are_kept : {true, false}) {
        if (!are_kept && std::ranges::count(drafts, -1) > 0) continue;
        ids.push_back(3);
        num_drafts.push_back(static_cast<int32_t>(count));
        num_drafts.resize(num_drafts.size() + count);
        for (const int32_t token : tokens) sampled.push_back(row_of(token));
        for (const int32_t draft : drafts) {
          ids.push_back(are_kept ? ~static_cast<int32_t>(kept.size()) : draft);
          if (are_kept) kept.push_back(row_of(draft));
        }
      }
    });
  const int64_t num_rows = std::ssize(ids), right = num_rows + 5;
  for (int32_t& id : ids)
    if (id < 0) id -= static_cast<int32_t>(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) moves.push_back(static_cast<int32_t>(row % 3));
  sampled.insert(sampled.end(), kept.begin(), kept.end());
  std::vector<SampledRow> expected = sampled;
  Ids distances(static_cast<size_t>(right + num_rows), -7);
  const DeviceArray<SampledRow> on_device(sampled), copy(std::vector<SampledRow>(ids.size()));
  const DeviceArray<int32_t> device_ids(ids), device_drafts(num_drafts), device_moves(moves),
      device_distances(distances);
  ref::accept_drafts({expected.data(), nullptr, ids.data(), num_drafts.data(), moves.data(), num_rows,
                      distances.data(), right});
  cuda_accept_drafts()({on_device.data(), copy.data(), device_ids.data(), device_drafts.data(),
                        device_moves.data(), num_rows, device_distances.data(), right});
  wait();
  EXPECT_EQ(device_distances.values(), distances);
  const std::vector<SampledRow> actual = on_device.values(), copied = copy.values();
  for (size_t row = 0; row < ids.size(); ++row) {
    EXPECT_EQ(actual[row].token_id, expected[row].token_id) << row;
    for (const SampledRow& one : {actual[row], copied[row]}) {
      EXPECT_EQ(one.num_right, expected[row].num_right) << row;
      EXPECT_EQ(one.num_drafts, expected[row].num_drafts) << row;
    }
  }
}

TEST_F(AcceptDraftsCuda, MovesRowsLikeTheOracle) {
  std::mt19937 random(3);
  const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  for (const size_t num_rows : {1u, 7u, 64u, 65u, 300u}) {
    Ids distances(50), moves(num_rows), ids(num_rows), first(num_rows);
    std::vector<int64_t> positions(num_rows), features(num_rows);
    std::vector<SampleRowParams> params(num_rows);
    for (int32_t& distance : distances) distance = below(6);
    for (size_t row = 0; row < num_rows; ++row) {
      moves[row] = below(4) == 0 ? 0 : move_code(below(50), below(2) == 0);
      ids[row] = ~below(1000);
      positions[row] = first[row] = below(1000);
      features[row] = below(1000);
      params[row].random_state = random_state(row, positions[row]);
    }
    const DeviceArray<int32_t> device_distances(distances), device_moves(moves), device_ids(ids),
        device_first(first);
    const DeviceArray<int64_t> device_positions(positions), device_features(features);
    const DeviceArray<SampleRowParams> device_params(params);
    const auto count = static_cast<int64_t>(num_rows);
    cuda_move_rows()({device_distances.data(), device_moves.data(), device_ids.data(),
                      device_positions.data(), device_first.data(), device_features.data(), count});
    cuda_move_randoms()({device_params.data(), device_moves.data(), count});
    ref::move_rows(
        {distances.data(), moves.data(), ids.data(), positions.data(), first.data(), features.data(), count});
    ref::move_randoms({params.data(), moves.data(), count});
    wait();
    EXPECT_EQ(device_moves.values(), moves);
    EXPECT_EQ(device_ids.values(), ids);
    EXPECT_EQ(device_first.values(), first);
    EXPECT_EQ(device_positions.values(), positions);
    EXPECT_EQ(device_features.values(), features);
    const std::vector<SampleRowParams> moved = device_params.values();
    for (size_t row = 0; row < num_rows; ++row) EXPECT_EQ(moved[row].random, params[row].random) << row;
  }
}

}  // namespace
}  // namespace fp4moe
