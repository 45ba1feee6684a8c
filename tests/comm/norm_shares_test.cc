// Sums whose rows the ranks of a group share, against the sums in which every rank adds and norms all rows,
// bit for bit. If the machine has fewer GPUs than ranks, several ranks share a GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "comm/device_communicator.h"
#include "comm/gpu_ranks.h"
#include "device/graph.h"
#include "device/pinned_memory.h"
#include "formats/bf16.h"
#include "kernels/device_moe.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kUntouched = -77;
constexpr int64_t kTopk = 3;

// First rows of the ranks' shares.
using Shares = std::vector<int64_t>;
Shares even_shares(int64_t rows, int num_ranks) {
  Shares first;
  for (int r = 0; r <= num_ranks; ++r) first.push_back(rows * r / num_ranks);
  return first;
}
// The last rank has all rows.
Shares skewed_shares(int64_t rows, int num_ranks) {
  Shares first(static_cast<size_t>(num_ranks), 0);
  first.push_back(rows);
  return first;
}

// The operands of one rank, for the shared sum [0] and the whole one [1].
struct Operands {
  Buffer partial, y, row_of_slot, slot_weights, norm_weight, residual[2], f32[2], act, shared_act;
};

class NormShares : public testing::TestWithParam<int> {
 protected:
  static constexpr DeviceRegion kRegion{0, 128 << 10, 128 << 10, 256 << 10};

  static std::vector<Operands> make(TestGroup& group, int64_t rows, int64_t cols, uint64_t seed) {
    std::vector<Operands> all;
    group.for_each([&](int r, DeviceCommunicator&) {
      const auto own = seed + static_cast<uint64_t>(r);
      std::mt19937_64 random(own);
      std::vector<bf16> y;
      for (const float v : random_floats(rows * kTopk * cols, own + 100)) y.push_back(float_to_bf16(v));
      std::vector<int32_t> row_of_slot;
      for (int64_t i = 0; i < rows * kTopk; ++i)
        row_of_slot.push_back(random() % 4 == 0 ? -1 : static_cast<int32_t>(random() % (rows * kTopk)));
      Operands o{on_device(random_floats(rows * cols, own)),
                 on_device(y),
                 on_device(row_of_slot),
                 on_device(random_floats(rows * kTopk, own + 200)),
                 on_device(random_floats(cols, 5)),
                 {},
                 {},
                 on_device(std::vector<uint16_t>(static_cast<size_t>(rows * cols), 0xabab)),
                 on_device(std::vector<uint16_t>(static_cast<size_t>(rows * cols), 0xabab))};
      for (int k = 0; k < 2; ++k) {
        o.residual[k] = on_device(random_floats(rows * cols, seed + 300));
        o.f32[k] = on_device(std::vector<float>(static_cast<size_t>(rows * cols), kUntouched));
      }
      all.push_back(std::move(o));
    });
    return all;
  }

  // Enqueues the shared sum on a rank and copies the rows that it receives, as a later kernel reads them.
  static void enqueue_shares(const DeviceCommunicator& rank, const Operands& o, int64_t rows, int64_t cols,
                             bool of_experts, const Shares& first) {
    const RmsNormArgs norm = norm_of(o, 0, rank.normed_rows(), rows, cols);
    if (of_experts)
      rank.sum_norm_shares({"shares", 1}, experts_of(o, rows, cols), o.residual[0].as<float>(), norm, first);
    else
      rank.sum_norm_shares({"shares", 1}, o.partial.as<float>(), o.residual[0].as<float>(), norm, first);
    copy_async(o.shared_act.data(), rank.normed_rows(), rows * cols * int64_t{sizeof(bf16)});
  }
  static void enqueue_whole(const DeviceCommunicator& rank, const Operands& o, int64_t rows, int64_t cols,
                            bool of_experts) {
    const RmsNormArgs norm = norm_of(o, 1, o.act.data(), rows, cols);
    if (of_experts)
      rank.add_all_reduced_norm({"whole", 2}, experts_of(o, rows, cols), o.residual[1].as<float>(), norm);
    else
      rank.add_all_reduced_norm({"whole", 2}, o.partial.as<float>(), o.residual[1].as<float>(), norm);
  }

  // Expects the rank's own rows of the residual and of f32, the other rows unchanged, and all normed rows.
  static void check(const Operands& o, int64_t cols, int64_t begin, int64_t end,
                    const std::vector<float>& before, const std::string& what) {
    std::vector<float> residual = before, f32(before.size(), kUntouched);
    const auto whole = from_device<float>(o.residual[1]), whole_f32 = from_device<float>(o.f32[1]);
    for (int64_t i = begin * cols; i < end * cols; ++i) {
      residual[static_cast<size_t>(i)] = whole[static_cast<size_t>(i)];
      f32[static_cast<size_t>(i)] = whole_f32[static_cast<size_t>(i)];
    }
    EXPECT_TRUE(same_bits(from_device<float>(o.residual[0]), residual)) << what;
    EXPECT_TRUE(same_bits(from_device<float>(o.f32[0]), f32)) << what;
    EXPECT_EQ(from_device<uint16_t>(o.shared_act), from_device<uint16_t>(o.act)) << what;
    EXPECT_FALSE(same_bits(whole, before)) << what;
  }

 private:
  static MoeCombineArgs experts_of(const Operands& o, int64_t rows, int64_t cols) {
    return {.y_bf16 = o.y.as<bf16>(),
            .row_of_slot = o.row_of_slot.as<int32_t>(),
            .weights = o.slot_weights.as<float>(),
            .num_tokens = rows,
            .topk = kTopk,
            .hidden_size = cols};
  }
  static RmsNormArgs norm_of(const Operands& o, int k, void* act, int64_t rows, int64_t cols) {
    return {o.residual[k].as<float>(),
            o.norm_weight.as<float>(),
            1e-5f,
            {act, DType::kBF16, rows, cols},
            o.f32[k].as<float>()};
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, NormShares, testing::Values(1, 2, 3, 4, 8));

TEST_P(NormShares, HaveTheBitsOfWholeSums) {
  // One row (all shares but one are empty), a remainder, several pieces, eight elements per thread, a
  // remainder of a warp, more rows than blocks.
  constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 2880},  {11, 2880}, {43, 2880}, {9, 8192},
                                                    {40, 1000}, {9, 40},    {1500, 64}};
  for (const bool bf16_partials : {false, true}) {
    TestGroup group(GetParam(), kRegion);
    if (bf16_partials) group.for_each([](int, DeviceCommunicator& rank) { rank.send_bf16_partials(); });
    for (const auto& [rows, cols] : kSizes)
      for (const bool of_experts : {false, true})
        for (const Shares& first : {even_shares(rows, group.size()), skewed_shares(rows, group.size())}) {
          std::vector<Operands> all = make(group, rows, cols, 40);
          group.for_each([&](int r, DeviceCommunicator& rank) {
            const Operands& o = all[static_cast<size_t>(r)];
            enqueue_shares(rank, o, rows, cols, of_experts, first);
            enqueue_whole(rank, o, rows, cols, of_experts);
          });
          group.expect_ok();
          for (size_t r = 0; r < all.size(); ++r)
            check(all[r], cols, first[r], first[r + 1], random_floats(rows * cols, 340),
                  std::to_string(rows) + " x " + std::to_string(cols) + ", rank " + std::to_string(r));
        }
  }
}

// Sums follow each other without a pause and are replayed by graphs, so that a rank that stored its normed
// rows too early would overwrite those that a peer still copies.
TEST_P(NormShares, RowsStayUntilTheNextSum) {
  constexpr int64_t kRows = 37, kCols = 640;
  constexpr int kSums = 6, kReplays = 20;
  TestGroup group(GetParam(), kRegion);
  const Shares first = even_shares(kRows, group.size());
  std::vector<std::vector<Operands>> sums;
  for (uint64_t i = 0; i < kSums; ++i) sums.push_back(make(group, kRows, kCols, 1000 * i));
  std::vector<Buffer> before;  // the residual of each sum of each rank
  for (const auto& sum : sums)
    group.for_each([&](int r, DeviceCommunicator&) {
      before.push_back(on_device(from_device<float>(sum[static_cast<size_t>(r)].residual[0])));
    });
  std::vector<Graph> graphs;
  group.for_each([&](int r, DeviceCommunicator& rank) {
    const auto at = static_cast<size_t>(r);
    for (const auto& sum : sums) enqueue_whole(rank, sum[at], kRows, kCols, false);
    auto graph = Graph::capture(group.ranks[at]->stream, [&]() -> Status {
      for (size_t i = 0; i < sums.size(); ++i) {
        const Operands& o = sums[i][at];
        copy_async(o.residual[0].data(), before[i * group.ranks.size() + at].data(), 4 * kRows * kCols);
        enqueue_shares(rank, o, kRows, kCols, false, first);
      }
      return {};
    });
    graphs.push_back(std::move(graph).value());
  });
  group.replay(graphs, kReplays);
  group.expect_ok();
  for (size_t i = 0; i < sums.size(); ++i)
    for (size_t r = 0; r < group.ranks.size(); ++r)
      check(sums[i][r], kCols, first[r], first[r + 1], from_device<float>(before[i * group.ranks.size() + r]),
            "sum " + std::to_string(i) + ", rank " + std::to_string(r));
}

// Rows of an index, in any order and more than once, from the ranks that have them.
TEST_P(NormShares, RowsAreGatheredFromTheirRanks) {
  constexpr int64_t kRows = 50, kCols = 36;
  const std::vector<int64_t> index = {49, 0, 0, 13, 24, 25, 26, 1, 48, 49, 30};
  TestGroup group(GetParam(), {0, 128, 1024});  // seven rows at a time
  for (const Shares& first : {even_shares(kRows, group.size()), skewed_shares(kRows, group.size())}) {
    const std::vector<float> all = random_floats(kRows * kCols, 9);
    std::vector<float> expected;
    for (const int64_t row : index)
      expected.insert(expected.end(), all.begin() + row * kCols, all.begin() + (row + 1) * kCols);
    std::vector<Buffer> x, out, rows;
    group.for_each([&](int r, DeviceCommunicator&) {
      std::vector<float> own(all.size(), kUntouched);
      const auto begin = first[static_cast<size_t>(r)] * kCols,
                 end = first[static_cast<size_t>(r) + 1] * kCols;
      std::copy(all.begin() + begin, all.begin() + end, own.begin() + begin);
      x.push_back(on_device(own));
      out.push_back(on_device(std::vector<float>(expected.size())));
      rows.push_back(on_device(index));
    });
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto at = static_cast<size_t>(r);
      rank.gather_shares({"rows", 3},
                         {x[at].data(), out[at].data(), rows[at].as<int64_t>(), std::ssize(index),
                          kCols * int64_t{sizeof(float)}},
                         first);
    });
    group.expect_ok();
    for (const Buffer& got : out) EXPECT_TRUE(same_bits(from_device<float>(got), expected));
  }
}

// A gather into rows that are apart: two arrays of the ranks' parts.
TEST_P(NormShares, ColumnsAreGatheredIntoSeparateArrays) {
  for (const int64_t unit : {4, 16}) {
    TestGroup group(GetParam());
    std::vector<int64_t> first = {0};
    for (int r = 0; r < group.size(); ++r) first.push_back(first.back() + unit * (5 + r));
    const int64_t width = first.back(), gap = 4 * unit;
    std::vector<uint8_t> expected(static_cast<size_t>(2 * width + gap), 0xcc);
    for (int64_t i = 0; i < width; ++i) {
      expected[static_cast<size_t>(i)] = static_cast<uint8_t>(i);
      expected[static_cast<size_t>(width + gap + i)] = static_cast<uint8_t>(i + 100);
    }
    std::vector<Buffer> mine, out;
    group.for_each([&](int r, DeviceCommunicator&) {
      const auto begin = first[static_cast<size_t>(r)], end = first[static_cast<size_t>(r) + 1];
      std::vector<uint8_t> own(expected.begin() + begin, expected.begin() + end);
      own.insert(own.end(), expected.begin() + width + gap + begin, expected.begin() + width + gap + end);
      mine.push_back(on_device(own));
      out.push_back(on_device(std::vector<uint8_t>(expected.size(), 0xcc)));
    });
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto at = static_cast<size_t>(r);
      rank.gather_columns({"apart"}, mine[at].data(), 2, first, out[at].data(), {.pitch = width + gap});
    });
    group.expect_ok();
    for (const Buffer& got : out) EXPECT_EQ(from_device<uint8_t>(got), expected);
  }
}

TEST(NormSharesOfFewRows, AreNotWorthIt) {
  for (const int num_ranks : {1, 2}) {
    TestGroup group(num_ranks, {0, 128 << 10, 128, 8 << 20});
    group.for_each([&](int, DeviceCommunicator& rank) {
      EXPECT_FALSE(rank.shares_norm(64, 1000));
      EXPECT_EQ(rank.shares_norm(4096, 1000), num_ranks > 1);
      EXPECT_FALSE(rank.shares_norm(4096, 1002)) << "not a multiple of 4";
      EXPECT_FALSE(rank.shares_norm(4096, 1200)) << "no room for the rows";
    });
  }
}

}  // namespace
}  // namespace fp4moe
