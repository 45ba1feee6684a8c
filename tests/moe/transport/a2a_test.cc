// Compares the transports on thread ranks with plain loops over tokens and slots, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "moe/a2a_case.h"
#include "support/compare.h"

namespace fp4moe::test {
namespace {

// Runs the case on new ranks; every rank of a group must have the group's expected output.
std::vector<RankOutcome> check(const A2aCase& c, int repeats = 1) {
  A2aWorld world({.ranks = c.layout.tp, .dp = c.layout.dp, .heap_bytes = c.budget});
  const std::vector<RankOutcome> outcomes = world.run(c, repeats);
  const auto expected = expected_output(c);
  for (size_t r = 0; r < outcomes.size(); ++r) {
    const RankOutcome& o = outcomes[r];
    EXPECT_TRUE(o.status.ok()) << "rank " << r << ": " << o.status.to_string();
    if (!o.status.ok()) break;
    EXPECT_TRUE(same_bits(o.out, expected[r / static_cast<size_t>(c.layout.attention_tp())])) << "rank " << r;
    EXPECT_LE(o.arena_used, o.arena_promised);
  }
  return outcomes;
}

A2aCase make_case(const char* protocol, int ranks, int dp = 1) {
  A2aCase c;
  c.protocol = protocol;
  c.layout = {ranks, ranks, dp, 0};
  return c;
}

// Protocol x ranks x groups x payload x results x type, with dropped ids, duplicates and ragged groups.
struct Grid {
  const char* protocol;
  int ranks, dp;
};
class ProtocolTest : public testing::TestWithParam<Grid> {};

TEST_P(ProtocolTest, EqualsPlainLoops) {
  const Grid& grid = GetParam();
  uint64_t seed = 1;
  for (const Payload payload : {Payload::kAct, Payload::kFp8, Payload::kNvfp4})
    for (const DType dtype : {DType::kBF16, DType::kF32})
      for (const int variant : {0, 1, 2}) {
        A2aCase c = make_case(grid.protocol, grid.ranks, grid.dp);
        c.payload = payload;
        c.dtype = dtype;
        c.K = 3;
        c.combine = variant == 1 ? CombinePayload::kFp8 : CombinePayload::kAct;
        c.deterministic = variant == 2;
        c.per_token = variant == 1;
        c.checksum = variant != 0;
        c.budget = 256 << 10;
        std::vector<int64_t> tokens;
        for (int g = 0; g < grid.dp; ++g) tokens.push_back((5 + 11 * g) % 17);
        fill_tokens(c, {.seed = seed++, .tokens = tokens, .hot = variant == 1 ? 0.5 : 0.0});
        SCOPED_TRACE(std::string(payload_name(payload)) + " " + dtype_name(dtype) + " variant " +
                     std::to_string(variant));
        check(c);
        if (HasFailure()) return;
      }
}

INSTANTIATE_TEST_SUITE_P(All, ProtocolTest,
                         testing::Values(Grid{"deepep", 1, 1}, Grid{"deepep", 2, 1}, Grid{"deepep", 2, 2},
                                         Grid{"deepep", 4, 1}, Grid{"deepep", 4, 2}, Grid{"deepep", 4, 4},
                                         Grid{"deepep", 8, 8}, Grid{"flashinfer", 1, 1},
                                         Grid{"flashinfer", 2, 1}, Grid{"flashinfer", 2, 2},
                                         Grid{"flashinfer", 4, 1}, Grid{"flashinfer", 4, 4},
                                         Grid{"flashinfer", 8, 1}, Grid{"flashinfer", 8, 8},
                                         Grid{"none", 1, 1}, Grid{"none", 2, 1}, Grid{"none", 4, 1},
                                         Grid{"none", 8, 1}, Grid{"none", 2, 2}, Grid{"none", 4, 2},
                                         Grid{"none", 4, 4}, Grid{"none", 8, 8}),
                         [](const auto& test) {
                           return std::string(test.param.protocol) + "_R" + std::to_string(test.param.ranks) +
                                  "_dp" + std::to_string(test.param.dp);
                         });

// Experts are split along I instead of being distributed over ranks.
TEST(NoneTest, SplitExperts) {
  for (const int dp : {1, 2, 4})
    for (const bool deterministic : {false, true}) {
      A2aCase c = make_case("none", 4, dp);
      c.layout.ep = 1;
      c.deterministic = deterministic;
      fill_tokens(c, {.tokens = std::vector<int64_t>(static_cast<size_t>(dp), 9)});
      check(c);
    }
}

// With deepep, any number of ranks gives the same bits as one rank.
TEST(DeepepTest, RanksDoNotChangeABit) {
  A2aCase one = make_case("deepep", 1);
  one.K = 4;
  fill_tokens(one, {.tokens = {37}});
  const auto single = check(one);
  for (const int ranks : {2, 4, 8}) {
    A2aCase many = one;
    many.layout = {ranks, ranks, 1, 0};
    for (const RankOutcome& o : check(many)) EXPECT_TRUE(same_bits(o.out, single[0].out)) << ranks;
  }
}

TEST(DeepepTest, ExpectedRowsOfAnExpertAreAHint) {
  A2aCase c = make_case("deepep", 4, 4);
  fill_tokens(c, {.tokens = {16, 3, 0, 1}});
  const auto outcomes = check(c);
  EXPECT_EQ(outcomes[0].expected_m, (16 * 4 * 2 + 8) / 8);
  EXPECT_EQ(outcomes[1].expected_m, (3 * 4 * 2 + 8) / 8);
  EXPECT_EQ(outcomes[2].expected_m, 1);
}

TEST(NoneTest, GroupsDoNotChangeABit) {
  A2aCase one = make_case("none", 4, 1), four = make_case("none", 4, 4);
  fill_tokens(four, {.tokens = {5, 0, 9, 2}});
  for (auto& g : four.groups) std::fill(g.addend.begin(), g.addend.end(), 0.0f);
  const auto parts = check(four);
  for (size_t g = 0; g < 4; ++g) {
    one.groups = {four.groups[g]};
    EXPECT_TRUE(same_bits(check(one)[0].out, parts[g].out)) << "group " << g;
  }
}

// F8: ranks without tokens.
class AnyProtocolTest : public testing::TestWithParam<const char*> {};
TEST_P(AnyProtocolTest, RanksWithoutTokens) {
  const std::vector<std::vector<int64_t>> batches = {{0, 3, 3, 3}, {0, 0, 0, 5}, {7, 0, 0, 0},
                                                     {0, 0, 0, 0}, {1, 1, 1, 1}, {1, 0, 64, 2}};
  for (const auto& tokens : batches) {
    A2aCase c = make_case(GetParam(), 4, 4);
    fill_tokens(c, {.tokens = tokens});
    check(c, 2);
  }
  // One group with fewer tokens than ranks.
  for (const int64_t T : {0, 1, 3}) {
    A2aCase c = make_case(GetParam(), 4, 1);
    fill_tokens(c, {.tokens = {T}});
    check(c, 2);
  }
}
// F7, F10: ids that are not experts, duplicates, K = 1, K = E. The next test covers NaN and infinite weights.
TEST_P(AnyProtocolTest, OddIdsAndWeights) {
  A2aCase c = make_case(GetParam(), 4, 4);
  for (const int64_t K : {1, 8}) {
    c.K = K;
    fill_tokens(c, {.tokens = {6, 6, 6, 6}, .dropped = K == 1 ? 0.5 : 0.0});
    if (K == c.E)
      for (auto& g : c.groups)
        for (size_t i = 0; i < g.ids.size(); ++i) g.ids[i] = static_cast<int32_t>(i % 8);
    check(c);
  }
  c.K = 4;
  fill_tokens(c, {.tokens = {6, 6, 6, 6}, .dropped = 1.0});  // nothing to send
  check(c);
  fill_tokens(c, {
                     .tokens = {6, 6, 6, 6},
                     .hot = 1.0,
                 });  // every slot names the same expert
  check(c);
}
TEST_P(AnyProtocolTest, WeightsThatAreNoNumbersStayInTheirToken) {
  A2aCase c = make_case(GetParam(), 2, 2);
  fill_tokens(c, {.tokens = {4, 4}, .dropped = 0});
  auto& g = c.groups[0];
  g.weights[0] = std::numeric_limits<float>::quiet_NaN();
  g.weights[2] = std::numeric_limits<float>::infinity();
  g.ids[4] = -1;  // the weight of a dropped slot is ignored, even if it is NaN
  g.weights[4] = std::numeric_limits<float>::quiet_NaN();
  A2aWorld world({.ranks = 2, .dp = 2});
  const auto outcomes = world.run(c);
  const auto expected = expected_output(c);
  ASSERT_TRUE(outcomes[0].status.ok()) << outcomes[0].status.to_string();
  const auto& out = outcomes[0].out;
  for (int64_t h = 0; h < c.H; ++h) {
    EXPECT_TRUE(std::isnan(out[static_cast<size_t>(h)]));
    EXPECT_FALSE(std::isfinite(out[static_cast<size_t>(c.H + h)]));
  }
  for (auto i = static_cast<size_t>(2 * c.H); i < out.size(); ++i) ASSERT_EQ(out[i], expected[0][i]);
  EXPECT_TRUE(same_bits(outcomes[1].out, expected[1]));
}

TEST_P(AnyProtocolTest, PermutedTokensGivePermutedOutput) {
  A2aCase c = make_case(GetParam(), 4, 4), reversed = c;
  fill_tokens(c, {.tokens = {8, 8, 8, 8}});
  reversed.groups = c.groups;
  for (auto& g : reversed.groups)
    for (int64_t t = 0; t < g.T / 2; ++t) {
      const auto swap = [&](auto& v, int64_t width) {
        std::swap_ranges(v.begin() + t * width, v.begin() + (t + 1) * width,
                         v.begin() + (g.T - 1 - t) * width);
      };
      swap(g.x, c.H), swap(g.addend, c.H), swap(g.ids, c.K), swap(g.weights, c.K);
    }
  const auto a = check(c), b = check(reversed);
  for (size_t r = 0; r < a.size(); ++r)
    for (int64_t t = 0; t < 8; ++t)
      EXPECT_EQ(std::memcmp(a[r].out.data() + t * c.H, b[r].out.data() + (7 - t) * c.H,
                            static_cast<size_t>(c.H) * 4),
                0);
}

// F9 and the token cap: batches that do not fit are split into rounds and chunks.
TEST_P(AnyProtocolTest, SmallBudgetsMeanMoreRounds) {
  A2aCase c = make_case(GetParam(), 4, 4);
  c.max_group_rows = 128;
  c.checksum = true;
  for (const double hot : {0.0, 1.0}) {
    fill_tokens(c, {.tokens = {128, 1, 77, 0}, .hot = hot});
    c.budget = 1 << 20;
    const auto roomy = check(c);
    c.budget = 30 << 10;
    const auto tight = check(c);
    EXPECT_EQ(roomy[0].rounds, 1);
    EXPECT_GT(tight[0].rounds, 2);
    EXPECT_EQ(tight[0].rounds, tight[3].rounds);
    for (const RankOutcome& o : tight) EXPECT_LE(o.arena_used, o.arena_promised);
  }
}
INSTANTIATE_TEST_SUITE_P(All, AnyProtocolTest, testing::Values("deepep", "flashinfer", "none"),
                         [](const auto& test) { return std::string(test.param); });

TEST(BudgetTest, TooSmallIsRefusedWithTheFormula) {
  A2aCase c = make_case("deepep", 4);
  c.budget = 5000;
  const auto bytes = a2a_bytes("deepep", c.options(0));
  ASSERT_FALSE(bytes.ok());
  EXPECT_EQ(bytes.status().code(), StatusCode::kDoesNotFit);
  const std::string& message = bytes.status().message();
  EXPECT_NE(message.find("--a2a-memory-budget 5000"), std::string::npos) << message;
  // The budget that the message names suffices, and one byte less does not.
  const auto at = message.find("at least ") + 9;
  c.budget = std::stoll(message.substr(at));
  EXPECT_TRUE(a2a_bytes("deepep", c.options(0)).ok());
  fill_tokens(c, {.tokens = {13}});
  check(c);
  --c.budget;
  EXPECT_FALSE(a2a_bytes("deepep", c.options(0)).ok());
}

TEST(BudgetTest, HeapStaysWithinIt) {
  for (const char* protocol : {"deepep", "flashinfer"})
    for (const int64_t budget : {64 << 10, 1 << 20, 64 << 20}) {
      A2aCase c = make_case(protocol, 8, 8);
      c.budget = budget;
      c.max_group_rows = 10000000;
      const auto bytes = a2a_bytes(protocol, c.options(0));
      ASSERT_TRUE(bytes.ok()) << bytes.status().to_string();
      EXPECT_LE(bytes->heap + Communicator::heap_bytes(8, bytes->record, 0), budget);
      EXPECT_GT(bytes->heap + Communicator::heap_bytes(8, bytes->record, 0), budget * 9 / 10);
    }
}

TEST(LayoutTest, ExpertsThatCannotBeSharedOutAreRefused) {
  // FlashInfer's published cases in which R does not divide E.
  for (const auto& [ranks, experts] : {std::pair{4, 30}, {5, 64}, {3, 16}}) {
    A2aCase c = make_case("flashinfer", ranks, 1);
    c.E = experts;
    const auto bytes = a2a_bytes("flashinfer", c.options(0));
    ASSERT_FALSE(bytes.ok());
    EXPECT_NE(
        bytes.status().message().find(std::to_string(experts) + " experts over ep=" + std::to_string(ranks)),
        std::string::npos);
  }
}

// FlashInfer's published shapes of dispatch and combine.
TEST(FlashinferTest, PublishedShapes) {
  struct Shape {
    int ranks;
    int64_t T, H, K;
  };
  for (const Shape& s : {Shape{4, 16, 4096, 2},
                         {4, 16, 2880, 4},
                         {8, 16, 5120, 6},
                         {8, 16, 7168, 8},
                         {8, 16, 4096, 16},
                         {2, 5, 16, 2},
                         {4, 32, 256, 2},
                         {8, 16, 2048, 2}}) {
    for (const CombinePayload combine : {CombinePayload::kAct, CombinePayload::kFp8}) {
      A2aCase c = make_case("flashinfer", s.ranks, s.ranks);
      c.H = s.H, c.K = s.K, c.E = 32;
      c.budget = 16 << 20;
      c.combine = combine;
      fill_tokens(c, {.tokens = std::vector<int64_t>(static_cast<size_t>(s.ranks), s.T), .dropped = 0});
      check(c);
    }
  }
}

TEST(RepeatTest, SameBitsAThousandTimes) {
  for (const char* protocol : {"deepep", "flashinfer"}) {
    A2aCase c = make_case(protocol, 4, 4);
    fill_tokens(c, {.tokens = {7, 3, 0, 12}});
    check(c, 500);
  }
}

// F17: signals and epochs wrap around.
TEST(EpochTest, Wraps) {
  A2aCase c = make_case("deepep", 4, 4);
  fill_tokens(c, {.tokens = {7, 3, 0, 12}});
  A2aWorld world({.ranks = 4, .dp = 4, .first_signal = 0u - 3});
  const auto outcomes = world.run(c, 20);
  const auto expected = expected_output(c);
  for (size_t r = 0; r < 4; ++r) {
    ASSERT_TRUE(outcomes[r].status.ok()) << outcomes[r].status.to_string();
    EXPECT_TRUE(same_bits(outcomes[r].out, expected[r]));
  }
}

}  // namespace
}  // namespace fp4moe::test
