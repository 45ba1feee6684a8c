// Tests ExchangePlan: every row is placed once, within the capacities and identically on all ranks; counts
// are checked before use.
#include "moe/transport/exchange_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>

namespace fp4moe {
namespace {

// A token is the list of its sends. A World holds the tokens of all ranks.
using Token = std::vector<Send>;
struct World {
  ExchangeShape shape;
  std::vector<std::vector<Token>> tokens;  // [R][T]
};

ExchangeShape shape_of(int ranks, int64_t units, int64_t top_k, int64_t room, int64_t return_rows) {
  ExchangeShape s;
  s.num_ranks = ranks;
  s.num_units = units;
  s.top_k = top_k;
  s.max_group_rows = 1000;
  s.max_blocks = 3;
  s.unit_rows = s.unit_slots = room;
  s.return_rows = return_rows;
  return s;
}

// Packs one record per rank, starting at token first[r]; advances first[].
std::vector<uint8_t> pack(const World& w, std::vector<BlockPacker>& packers, std::vector<int64_t>& first) {
  const int64_t bytes = exchange_record_bytes(w.shape);
  std::vector<uint8_t> records(static_cast<size_t>(w.shape.num_ranks * bytes), 0xee);
  for (size_t r = 0; r < w.tokens.size(); ++r) {
    auto* record = reinterpret_cast<RankRecord*>(records.data() + static_cast<int64_t>(r) * bytes);
    const auto T = static_cast<int64_t>(w.tokens[r].size());
    packers[r].start(first[r], record);
    while (packers[r].next_token() < T &&
           packers[r].add(w.tokens[r][static_cast<size_t>(packers[r].next_token())])) {
    }
    first[r] = packers[r].next_token();
    packers[r].finish(T, T - first[r]);
  }
  return records;
}

// Walks through a whole exchange and checks everything that the header guarantees.
void walk(const World& w) {
  const ExchangeShape& s = w.shape;
  const auto R = static_cast<size_t>(s.num_ranks);
  std::vector<BlockPacker> packers(R, BlockPacker(s));
  std::vector<int64_t> first(R), seen(R);
  for (bool more = true; more;) {
    const std::vector<uint8_t> records = pack(w, packers, first);
    ExchangePlan plan(s);
    const Status made = plan.make(records.data());
    ASSERT_TRUE(made.ok()) << made.to_string();
    for (int64_t round = 0; round < plan.num_rounds(); ++round) {
      plan.enter(round);
      std::map<int64_t, std::set<int64_t>> places;  // per unit
      std::vector<int64_t> arrived(static_cast<size_t>(s.num_units)), slots(arrived);
      int64_t tokens_of_all = 0;
      for (int r = 0; r < s.num_ranks; ++r) {
        const Shard tokens = packers[static_cast<size_t>(r)].tokens(plan.blocks(r));
        ASSERT_EQ(tokens.first, seen[static_cast<size_t>(r)]);
        seen[static_cast<size_t>(r)] += tokens.count;
        tokens_of_all += tokens.count;
        std::vector<int64_t> sent(static_cast<size_t>(s.num_units));
        std::set<int64_t> returns;
        for (int64_t t = tokens.first; t < tokens.first + tokens.count; ++t)
          for (const Send& send : w.tokens[static_cast<size_t>(r)][static_cast<size_t>(t)]) {
            const auto u = static_cast<size_t>(send.unit);
            ASSERT_TRUE(places[send.unit].insert(plan.first_row(r, send.unit) + sent[u]).second);
            ASSERT_TRUE(returns.insert(plan.first_return(r, send.unit) + sent[u]).second);
            ++sent[u], ++arrived[u];
            slots[u] += send.slots;
          }
        for (int64_t u = 0; u < s.num_units; ++u) ASSERT_EQ(plan.rows(r, u), sent[static_cast<size_t>(u)]);
        ASSERT_LE(static_cast<int64_t>(returns.size()), s.return_rows);
        const auto returned = static_cast<int64_t>(returns.size());
        ASSERT_EQ(returns.empty() ? -1 : *returns.rbegin(), returned - 1);
      }
      ASSERT_GT(tokens_of_all, 0) << "a round without work";
      for (int64_t u = 0; u < s.num_units; ++u) {
        ASSERT_EQ(plan.unit_rows(u), arrived[static_cast<size_t>(u)]);
        ASSERT_LE(arrived[static_cast<size_t>(u)], s.unit_rows);
        ASSERT_LE(slots[static_cast<size_t>(u)], s.unit_slots);
        ASSERT_EQ(places[u].empty() ? -1 : *places[u].rbegin(), arrived[static_cast<size_t>(u)] - 1);
      }
    }
    more = plan.more_chunks();
  }
  for (size_t r = 0; r < R; ++r) ASSERT_EQ(seen[r], static_cast<int64_t>(w.tokens[r].size()));
}

World random_world(uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int64_t>(random() % static_cast<uint32_t>(n)); };
  const int R = 1 << below(4);
  World w{shape_of(R, R * (1 + below(4)), 1 + below(6), 0, 0), {}};
  const bool hot = below(3) == 0;
  w.shape.unit_rows = w.shape.top_k + below(30);
  w.shape.unit_slots = w.shape.unit_rows;
  w.shape.return_rows = w.shape.top_k + below(60);
  w.tokens.resize(static_cast<size_t>(R));
  for (auto& tokens : w.tokens) {
    tokens.resize(static_cast<size_t>(below(4) == 0 ? 0 : below(60)));
    for (Token& token : tokens)
      for (int64_t k = 0; k < w.shape.top_k; ++k)
        if (below(5) != 0)  // other slots are dropped
          token.push_back({hot ? w.shape.num_units / 2 : below(static_cast<int>(w.shape.num_units)), 1,
                           static_cast<int32_t>(k)});
  }
  return w;
}

TEST(ExchangePlanTest, EveryRowHasItsPlace) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    walk(random_world(seed));
    if (HasFatalFailure()) return;
  }
}

TEST(ExchangePlanTest, NoTokensAtAll) {
  World w{shape_of(4, 8, 2, 4, 4), std::vector<std::vector<Token>>(4)};
  std::vector<BlockPacker> packers(4, BlockPacker(w.shape));
  std::vector<int64_t> first(4);
  const auto records = pack(w, packers, first);
  ExchangePlan plan(w.shape);
  ASSERT_TRUE(plan.make(records.data()).ok());
  EXPECT_EQ(plan.num_rounds(), 0);
  EXPECT_FALSE(plan.more_chunks());
}

// As many rows to one expert as its capacity take one round; one more row takes a second round.
TEST(ExchangePlanTest, CapacityAndOneMore) {
  for (const int64_t extra : {0, 1}) {
    World w{shape_of(1, 1, 1, 8, 8), std::vector<std::vector<Token>>(1)};
    w.shape.max_blocks = 100;
    w.tokens[0].assign(static_cast<size_t>(8 + extra), Token{{0, 1, 0}});
    std::vector<BlockPacker> packers(1, BlockPacker(w.shape));
    std::vector<int64_t> first(1);
    const auto records = pack(w, packers, first);
    ExchangePlan plan(w.shape);
    ASSERT_TRUE(plan.make(records.data()).ok());
    EXPECT_EQ(plan.num_rounds(), 1 + extra);
  }
}

TEST(ExchangePlanTest, TokensWithoutRowsTakePart) {
  World w{shape_of(2, 2, 2, 4, 4), std::vector<std::vector<Token>>(2, std::vector<Token>(5))};
  walk(w);
}

// F6: impossible records.
class CountsTest : public testing::Test {
 protected:
  CountsTest()
      : shape(shape_of(2, 4, 2, 6, 12)), records(static_cast<size_t>(2 * exchange_record_bytes(shape))) {
    for (int r = 0; r < 2; ++r) {
      *record(r) = {.group_rows = 3, .rows_left = 0, .num_blocks = 1, .total_rows = 2, .total_slots = 2};
      record(r)->counts()[1] = {2, 2};
    }
  }
  RankRecord* record(int r) {
    return reinterpret_cast<RankRecord*>(records.data() + r * exchange_record_bytes(shape));
  }
  std::string error() {
    ExchangePlan plan(shape);
    return plan.make(records.data()).to_string();
  }
  ExchangeShape shape;
  std::vector<uint8_t> records;
};

TEST_F(CountsTest, GoodOnesPass) { EXPECT_EQ(error(), "ok"); }

TEST_F(CountsTest, Negative) {
  record(1)->counts()[1].rows = -1;
  EXPECT_EQ(error(), "data_loss: a2a counts of rank 1, block 0: rows for expert 1: -1 (allowed: 0..6)");
}
TEST_F(CountsTest, MoreThanTheRoom) {
  record(1)->counts()[3] = {7, 7};
  EXPECT_EQ(error(), "data_loss: a2a counts of rank 1, block 0: rows for expert 3: 7 (allowed: 0..6)");
}
TEST_F(CountsTest, Huge) {
  record(0)->counts()[0].rows = std::numeric_limits<int32_t>::max();
  EXPECT_NE(error().find("rows for expert 0: 2147483647 (allowed: 0..6)"), std::string::npos);
}
TEST_F(CountsTest, SlotsThatTheRowsCannotHave) {
  record(0)->counts()[1].slots = 5;
  EXPECT_NE(error().find("slots for expert 1: 5 (allowed: 2..4)"), std::string::npos);
}
TEST_F(CountsTest, SumsThatDiffer) {
  record(1)->total_rows = 3;
  EXPECT_NE(error().find("rank 1: they add up to 2 rows and 2 slots, announced: 3 and 2"), std::string::npos);
}
TEST_F(CountsTest, Blocks) {
  record(1)->num_blocks = 4;
  EXPECT_NE(error().find("rank 1: blocks: 4 (allowed: 0..3)"), std::string::npos);
  record(1)->num_blocks = -1;
  EXPECT_NE(error().find("blocks: -1"), std::string::npos);
}
TEST_F(CountsTest, Tokens) {
  record(0)->group_rows = 1001;
  EXPECT_NE(error().find("rank 0: tokens: 1001 (allowed: 0..1000)"), std::string::npos);
  record(0)->group_rows = 3;
  record(0)->rows_left = 4;
  EXPECT_NE(error().find("tokens left: 4 (allowed: 0..3)"), std::string::npos);
}
TEST_F(CountsTest, TooManyReturns) {
  shape.return_rows = 3;
  record(0)->counts()[0] = record(0)->counts()[1] = {2, 2};
  EXPECT_NE(error().find("rank 0, block 0: total rows: 4 (allowed: 0..3)"), std::string::npos);
}
// F22: a rank of the group runs a different batch.
TEST_F(CountsTest, GroupsThatDisagree) {
  shape.group_ranks = 2;
  record(1)->group_rows = 4;
  EXPECT_EQ(error(),
            "invalid_argument: a2a: rank 1 has a batch of 4 tokens, but rank 0 of the same group has 3");
}

}  // namespace
}  // namespace fp4moe
