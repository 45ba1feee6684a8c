// Tests the transports when a rank misbehaves: every rank gets an error in time that names the cause, no
// token is wrong, and a new job works.
#include <gtest/gtest.h>

#include <chrono>

#include "moe/a2a_case.h"
#include "support/compare.h"

namespace fp4moe::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kDeadline = 0.4, kGrace = 5;  // seconds; generous for a busy machine

A2aCase small_case(const char* protocol, bool checksum = false) {
  A2aCase c;
  c.protocol = protocol;
  c.layout = {4, 4, 4, 0};
  c.checksum = checksum;
  c.max_group_rows = 16;
  fill_tokens(c, {.tokens = {5, 3, 0, 4}, .dropped = 0});
  return c;
}

A2aWorld::Options ranks_with(int faulty, const Faults& faults, double timeout = kDeadline) {
  A2aWorld::Options o{.ranks = 4, .dp = 4, .timeout_seconds = timeout};
  o.faults.resize(4);
  o.faults[static_cast<size_t>(faulty)] = faults;
  return o;
}

bool expected_bits(const A2aCase& c, const std::vector<RankOutcome>& outcomes, size_t rank) {
  const auto e = expected_output(c)[rank / static_cast<size_t>(c.layout.attention_tp())];
  return same_bits(outcomes[rank].out, e);
}

bool all_expected(const A2aCase& c, const std::vector<RankOutcome>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    if (!outcomes[r].status.ok() || !expected_bits(c, outcomes, r)) return false;
  return true;
}

// Checks that every rank failed with a message that contains all of `parts`.
void expect_failures(const std::vector<RankOutcome>& outcomes, const std::vector<std::string>& parts) {
  for (size_t r = 0; r < outcomes.size(); ++r) {
    ASSERT_FALSE(outcomes[r].status.ok()) << "rank " << r;
    for (const std::string& part : parts)
      EXPECT_NE(outcomes[r].status.message().find(part), std::string::npos)
          << "rank " << r << ": " << outcomes[r].status.to_string() << " lacks " << part;
  }
}

class FaultTest : public testing::TestWithParam<const char*> {};

// F5: losing any signal ends all ranks at the deadline.
TEST_P(FaultTest, LostSignal) {
  for (const int64_t signal : {0, 4, 9}) {
    const auto start = Clock::now();
    Faults f;
    f.drop_signal = signal;
    A2aWorld world(ranks_with(1, f));
    const auto outcomes = world.run(small_case(GetParam()), 3);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    EXPECT_LT(seconds, kDeadline + kGrace);
    expect_failures(outcomes, {"waited", "for rank ", "layer 3", "epoch ", "expected signal "});
  }
}

TEST_P(FaultTest, DoubledSignalIsHarmless) {
  for (const int64_t signal : {0, 5}) {
    Faults f;
    f.double_signal = signal;
    A2aWorld world(ranks_with(1, f, 10));
    const A2aCase c = small_case(GetParam());
    EXPECT_TRUE(all_expected(c, world.run(c, 3)));
  }
}

// F1 on threads: a rank stops all actions.
TEST_P(FaultTest, DeadRank) {
  for (const int64_t action : {0, 7, 20}) {
    const auto start = Clock::now();
    Faults f;
    f.dead_from = action;
    A2aWorld world(ranks_with(3, f));
    expect_failures(world.run(small_case(GetParam()), 5), {"waited", "for rank ", "layer 3"});
    EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), kDeadline + kGrace);
  }
}

// F2, F14: stalls within the deadline, delays and jitter change nothing.
TEST_P(FaultTest, SlowRanks) {
  Faults stall, slow;
  stall.stall_at = 6;
  stall.stall = std::chrono::milliseconds(500);
  slow.delay = std::chrono::milliseconds(1);
  slow.jitter = std::chrono::milliseconds(2);
  slow.yield_probability = 0.5;
  const A2aCase c = small_case(GetParam());
  for (const Faults& f : {stall, slow}) {
    A2aWorld world(ranks_with(2, f, 8));
    EXPECT_TRUE(all_expected(c, world.run(c, 3)));
  }
}

// F15: with checksums, a flipped bit in any put either causes an error that names its rank or changes
// nothing.
TEST_P(FaultTest, FlippedBits) {
  const A2aCase c = small_case(GetParam(), true);
  int detected = 0;
  for (int64_t put = 0; put < 60; ++put) {
    Faults f;
    f.flip_put = put;
    f.seed = static_cast<uint64_t>(put);
    A2aWorld world(ranks_with(1, f, 5));
    const auto outcomes = world.run(c);
    bool found = false;
    for (size_t r = 0; r < outcomes.size(); ++r) {
      const Status& status = outcomes[r].status;
      found |= !status.ok();
      if (status.ok())  // the rank finished before another rank detected the damage
        EXPECT_TRUE(expected_bits(c, outcomes, r)) << "put " << put << ", rank " << r;
      else
        EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.to_string();
    }
    detected += found ? 1 : 0;
  }
  EXPECT_GT(detected, 20);
}

// Without checksums values can be wrong, but received ids and counts are never trusted.
TEST_P(FaultTest, FlippedBitsWithoutChecksums) {
  A2aCase c = small_case(GetParam());
  c.H = 16;  // ids are a large part of a row
  fill_tokens(c, {.tokens = {5, 3, 0, 4}, .dropped = 0});
  for (int64_t put = 0; put < 60; ++put) {
    Faults f;
    f.flip_put = put;
    f.seed = static_cast<uint64_t>(put) + 7;
    A2aWorld world(ranks_with(1, f, 5));
    for (const RankOutcome& o : world.run(c))
      EXPECT_TRUE(o.status.ok() || o.status.message().find("rank 1") != std::string::npos)
          << o.status.to_string();
  }
}

TEST_P(FaultTest, ChecksumNamesRanksLayerAndEpoch) {
  A2aCase c = small_case(GetParam(), true);
  for (int64_t put = 0; put < 60; ++put) {
    Faults f;
    f.flip_put = put;
    A2aWorld world(ranks_with(1, f, 5));
    const auto outcomes = world.run(c);
    const std::string& message = outcomes[0].status.message();
    if (message.find("dispatch checksum is") == std::string::npos) continue;
    EXPECT_EQ(outcomes[0].status.code(), StatusCode::kDataLoss);
    EXPECT_NE(message.find("rows of rank 1 in layer 3, epoch "), std::string::npos) << message;
    EXPECT_NE(message.find("announced: "), std::string::npos) << message;
    return;
  }
  FAIL() << "no put of 60 carried rows";
}

// F11, F22: ranks that disagree about an exchange detect it before rows are sent.
TEST_P(FaultTest, RanksThatDisagree) {
  const A2aCase c = small_case(GetParam());
  const auto run = [&](const A2aWorld::Edit& edit) {
    A2aWorld world({.ranks = 4, .dp = 4, .timeout_seconds = 5});
    return world.run(c, 1, edit);
  };
  expect_failures(run([](int rank, A2aCase& mine) {
                    if (rank == 2) mine.payload = Payload::kFp8;
                  }),
                  {"geometry", "rank 2"});
  expect_failures(run([](int rank, A2aCase& mine) {
                    if (rank == 2) mine.max_group_rows *= 2;
                  }),
                  {"geometry", "rank 2"});
  expect_failures(run([](int rank, A2aCase& mine) {
                    if (rank == 2) mine.layer = 4;
                  }),
                  {"layer 3", "layer 4", "rank 2"});
}

// Ranks of one group have batches of different sizes.
TEST_P(FaultTest, GroupsThatDisagree) {
  A2aCase c = small_case(GetParam());
  c.layout.dp = 2;
  fill_tokens(c, {.tokens = {8, 8}});
  A2aWorld world({.ranks = 4, .dp = 2, .timeout_seconds = 5});
  const auto outcomes = world.run(c, 1, [](int rank, A2aCase& mine) {
    if (rank == 3) mine.groups[1].T = 7;
  });
  expect_failures(outcomes, {"rank 3 has a batch of 7 tokens, but rank 2 of the same group has 8"});
}

TEST_P(FaultTest, BatchesPastTheLimitAreRefused) {
  A2aCase c = small_case(GetParam());
  fill_tokens(c, {.tokens = {16, 17, 0, 0}});
  A2aWorld world({.ranks = 4, .dp = 4, .timeout_seconds = 5});
  expect_failures(world.run(c), {"a batch of 17 tokens; allowed: 0..16"});
}

INSTANTIATE_TEST_SUITE_P(All, FaultTest, testing::Values("deepep", "flashinfer", "none"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fp4moe::test
