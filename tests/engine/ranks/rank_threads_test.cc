#include "engine/ranks/rank_threads.h"

#include <gtest/gtest.h>

#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fp4moe {
namespace {

TEST(RankThreads, RunEveryRankOnItsThread) {
  RankThreads threads(4);
  std::vector<std::thread::id> first(4), now(4);
  for (int round = 0; round < 100; ++round) {
    EXPECT_TRUE(threads
                    .run([&](int rank) -> Status {
                      now.at(static_cast<size_t>(rank)) = std::this_thread::get_id();
                      return {};
                    })
                    .ok());
    if (round == 0) first = now;
    ASSERT_EQ(now, first);
  }
  EXPECT_EQ(first[0], std::this_thread::get_id());
  EXPECT_EQ(std::set<std::thread::id>(first.begin(), first.end()).size(), 4u);
}

TEST(RankThreads, NameTheRanksThatFail) {
  RankThreads threads(3);
  const auto run = [&](int bad, const Status& status) {
    return threads.run([&](int rank) { return rank == bad ? status : Status(); }).to_string();
  };
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(run(rank, data_loss("x")), "data_loss: rank " + std::to_string(rank) + ": x");
  EXPECT_EQ(run(3, data_loss("x")), "ok");
}

TEST(RankThreads, TurnExceptionsIntoStatuses) {
  RankThreads threads(2);
  EXPECT_EQ(threads
                .run([](int rank) -> Status {
                  if (rank == 1) throw std::bad_alloc();
                  return {};
                })
                .to_string(),
            "does_not_fit: rank 1: no memory");
  EXPECT_EQ(threads
                .run([](int rank) -> Status {
                  if (rank == 0) throw std::out_of_range("7");
                  return {};
                })
                .to_string(),
            "internal: rank 0: 7");
}

TEST(CauseOf, OtherErrorsPrecedeDeadlines) {
  const Status late{StatusCode::kDeadline, "late"};
  EXPECT_TRUE(cause_of(std::vector<Status>(3)).ok());
  EXPECT_EQ(cause_of(std::vector<Status>{late, {}, late}).to_string(), "deadline: rank 0: late");
  EXPECT_EQ(cause_of(std::vector<Status>{late, data_loss("a"), late, internal_error("b")}).to_string(),
            "data_loss: rank 1: a; rank 3: b");
}

}  // namespace
}  // namespace fp4moe
