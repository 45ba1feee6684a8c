// The exchanges of a group without shared memory, in host memory: what each rank sends arrives where the
// kernels of its peers read it, and nothing else is written.
#include "kernels/staged_transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

namespace fp4moe {
namespace {

using Bytes = std::vector<uint8_t>;

// Bytes that depend on all numbers.
Bytes bytes_of(int64_t num_bytes, int a, int b, int c = 0) {
  Bytes bytes(static_cast<size_t>(num_bytes));
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<uint8_t>(i * 7 + i / 251 + static_cast<size_t>(a * 83 + b * 29 + c * 11));
  return bytes;
}

// The ranks of a group, each with a region in host memory.
struct Ranks {
  CommLayout layout;
  std::vector<Bytes> regions;

  Ranks(int num_ranks, int64_t word_bytes, int64_t gather_bytes, int64_t exchange_bytes)
      : layout(comm_layout(num_ranks, word_bytes, gather_bytes, exchange_bytes, /*is_staged=*/true)) {
    for (int r = 0; r < num_ranks; ++r) regions.push_back(bytes_of(layout.num_bytes, r, 99));
  }
  int size() const { return static_cast<int>(regions.size()); }
  CommGroup group(int r) {
    CommGroup group{.rank = r, .size = size(), .regions = {}, .layout = layout};
    std::fill_n(group.regions, size(), regions[static_cast<size_t>(r)].data());
    return group;
  }
  uint8_t* at(int r, int64_t offset) { return regions[static_cast<size_t>(r)].data() + offset; }

  // Runs the transfers of all ranks. Each receive must have the size of its send.
  void exchange(const std::function<std::vector<PlaneTransfer>(int)>& transfers_of) {
    std::map<std::pair<int, int>, std::vector<PlaneTransfer>> lists;  // by rank and peer
    for (int r = 0; r < size(); ++r)
      for (const PlaneTransfer& t : transfers_of(r)) {
        ASSERT_TRUE(t.peer >= 0 && t.peer < size() && t.peer != r);
        lists[{r, t.peer}].push_back(t);
      }
    for (auto& [pair, receives] : lists) {
      const std::vector<PlaneTransfer>& sends = lists[{pair.second, pair.first}];
      ASSERT_EQ(receives.size(), sends.size());
      for (size_t i = 0; i < sends.size(); ++i) {
        ASSERT_EQ(receives[i].receive_bytes, sends[i].send_bytes);
        if (sends[i].send_bytes > 0)
          std::memcpy(receives[i].receive, sends[i].send, static_cast<size_t>(sends[i].send_bytes));
      }
    }
  }
  // Checks that region r differs from its initial bytes only where `expected` has been called for.
  void expect_only(int r, const std::map<int64_t, Bytes>& expected) {
    Bytes want = bytes_of(layout.num_bytes, r, 99);
    for (const auto& [offset, bytes] : expected) std::copy(bytes.begin(), bytes.end(), want.begin() + offset);
    EXPECT_EQ(regions[static_cast<size_t>(r)], want) << "rank " << r;
  }
};

class StagedTransfers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StagedTransfers, testing::Values(1, 2, 3, 4, 8));

TEST_P(StagedTransfers, OperandsOfSums) {
  Ranks ranks(GetParam(), 1024, 128, 0);
  std::vector<Bytes> operands;
  for (int r = 0; r < ranks.size(); ++r) operands.push_back(bytes_of(640, r, 1));
  ranks.exchange(
      [&](int r) { return sum_transfers(ranks.group(r), operands[static_cast<size_t>(r)].data(), 640); });
  for (int r = 0; r < ranks.size(); ++r) {
    std::map<int64_t, Bytes> expected;
    for (int peer = 0; peer < ranks.size(); ++peer)
      if (peer != r) expected[ranks.layout.words + peer * 1024] = operands[static_cast<size_t>(peer)];
    ranks.expect_only(r, expected);
    EXPECT_EQ(staged_words(ranks.group(r), 0), ranks.at(r, ranks.layout.words));
  }
}

// Rows whose columns have different widths, one of them none.
TEST_P(StagedTransfers, ColumnsOfRows) {
  constexpr int64_t kRows = 5;
  Ranks ranks(GetParam(), 128, 4096, 0);
  int64_t first[kMaxGroupRanks + 1] = {};
  for (int r = 0; r < ranks.size(); ++r) first[r + 1] = first[r] + 4 * (r == 1 ? 0 : r + 2);
  const int64_t width = first[ranks.size()];
  std::vector<Bytes> parts;
  for (int r = 0; r < ranks.size(); ++r) parts.push_back(bytes_of(kRows * (first[r + 1] - first[r]), r, 2));
  ranks.exchange([&](int r) {
    const CommGroup group = ranks.group(r);
    GatherArgs args{.group = group, .mine = parts[static_cast<size_t>(r)].data(), .rows = kRows};
    std::copy_n(first, ranks.size() + 1, args.first);
    return gather_transfers(args);
  });
  for (int r = 0; r < ranks.size(); ++r)
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t col = 0; col < width; ++col) {
        int source = 0;
        while (first[source + 1] <= col) ++source;
        if (source == r) continue;
        const int64_t at = row * (first[source + 1] - first[source]) + col - first[source];
        EXPECT_EQ(*ranks.at(r, ranks.layout.gather + kRows * first[source] + at),
                  parts[static_cast<size_t>(source)][static_cast<size_t>(at)]);
      }
}

struct Exchange {
  A2aShape shape;
  A2aArea area;
  int64_t num_tokens = 0;

  Exchange(bool slots_return, A2aRowFormat format, int num_ranks, int64_t max_tokens, int64_t tokens)
      : shape{.hidden_size = 64,
              .top_k = 3,
              .num_experts = 8,
              .experts_per_rank = 1,
              .row_format = format,
              .slots_return = slots_return,
              .is_staged = true},
        area(a2a_area(shape, num_ranks, max_tokens)),
        num_tokens(tokens) {}
  A2aRound round(const CommGroup& group) const {
    return {.group = group, .shape = shape, .area = area, .num_tokens = num_tokens};
  }
};

TEST_P(StagedTransfers, LanesAndResults) {
  for (const bool slots_return : {false, true})
    for (const A2aRowFormat format : {A2aRowFormat::kBf16, A2aRowFormat::kFp8, A2aRowFormat::kNvfp4})
      for (const int64_t tokens : {int64_t{1}, int64_t{6}, int64_t{7}}) {
        const Exchange e(slots_return, format, GetParam(), 7, tokens);
        Ranks ranks(GetParam(), 128, 128, (e.area.num_bytes + 127) / 128 * 128);
        const int64_t base = ranks.layout.exchange, rows = tokens * e.shape.row_bytes(), ids = tokens * 3 * 4;
        const int64_t results = tokens * (slots_return ? 3 : 1) * e.shape.result_bytes();
        const auto fill = [&](int r, int64_t offset, const Bytes& bytes) {
          std::copy(bytes.begin(), bytes.end(), ranks.at(r, base + offset));
        };
        std::vector<std::map<int64_t, Bytes>> expected(ranks.regions.size());
        for (int r = 0; r < ranks.size(); ++r) {
          auto& own = expected[static_cast<size_t>(r)];
          for (int source = 0; source < ranks.size(); ++source) {  // own lanes are filled, others arrive
            own[base + e.area.rows + source * rows] = bytes_of(rows, source, 3);
            own[base + e.area.ids + source * ids] = bytes_of(ids, source, 4);
            own[base + e.area.weights + source * ids] = bytes_of(ids, source, 5);
            if (source == r) continue;
            own[base + e.area.returns + source * results] = bytes_of(results, source, 6, r);
            own[base + e.area.outgoing + source * results] = bytes_of(results, r, 6, source);
            fill(r, e.area.outgoing + source * results, bytes_of(results, r, 6, source));
          }
          fill(r, e.area.rows + r * rows, bytes_of(rows, r, 3));
          fill(r, e.area.ids + r * ids, bytes_of(ids, r, 4));
          fill(r, e.area.weights + r * ids, bytes_of(ids, r, 5));
        }
        ranks.exchange([&](int r) { return row_transfers(e.round(ranks.group(r))); });
        ranks.exchange([&](int r) { return result_transfers(e.round(ranks.group(r))); });
        for (int r = 0; r < ranks.size(); ++r) ranks.expect_only(r, expected[static_cast<size_t>(r)]);
      }
}

TEST(StagedLayout, AreasDoNotOverlap) {
  const A2aShape shape{
      .hidden_size = 64, .top_k = 3, .num_experts = 8, .slots_return = true, .is_staged = true};
  const A2aArea area = a2a_area(shape, 4, 7);
  const int64_t results = 4 * 7 * 3 * 64 * 2;
  EXPECT_GE(area.outgoing, area.returns + results);
  EXPECT_GE(area.num_bytes, area.outgoing + results);
  const CommLayout layout = comm_layout(4, 1024, 256, 512, /*is_staged=*/true);
  EXPECT_EQ(layout.gather, layout.words + 4 * 1024);
  EXPECT_EQ(layout.exchange, layout.gather + 256);
  EXPECT_EQ(layout.num_bytes, layout.exchange + 512);
}

}  // namespace
}  // namespace fp4moe
