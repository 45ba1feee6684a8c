// Tests jobs with the fabrics threads and local: puts, signals, waits, deadlines, failures.
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>

#include "base/log.h"
#include "comm/rank_threads.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using test::on_every_rank;
using test::threads_job;

TEST(ThreadsJob, KnowsItsRanks) {
  const auto job = threads_job(3, 128);
  EXPECT_STREQ(job->fabric().name, "threads");
  EXPECT_EQ(job->num_processes(), 1);
  EXPECT_EQ(job->process(), 0);
  EXPECT_EQ(job->first_rank(), 0);
  EXPECT_EQ(job->num_local_ranks(), 3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job->endpoint(rank).rank(), rank);
    EXPECT_EQ(job->endpoint(rank).size(), 3);
    EXPECT_EQ(job->endpoint(rank).heap_bytes(), 128);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(job->endpoint(rank).heap()) % 64, 0u);
  }
}

TEST(ThreadsJob, LocalIsOneRank) {
  JobOptions options;
  options.heap_bytes = 64;
  const auto job = Job::open(options);
  ASSERT_TRUE(job.ok());
  EXPECT_STREQ((*job)->fabric().name, "local");
  Endpoint& self = (*job)->endpoint(0);
  uint32_t seen = 0;
  ASSERT_TRUE(self.put(0, 60, "abcd", 4).ok());
  ASSERT_TRUE(self.signal(0, 5, 9).ok());
  ASSERT_TRUE(self.wait(0, 5, 9, 1s, &seen).ok());
  EXPECT_EQ(std::memcmp(self.heap() + 60, "abcd", 4), 0);
}

TEST(ThreadsJob, BadOptionsAreRefused) {
  JobOptions options;
  options.heap_bytes = -1;
  EXPECT_EQ(Job::open(options).status().message(), "heap_bytes=-1 must be at least 0");
  options.heap_bytes = 0;
  options.timeout_seconds = 0;
  EXPECT_EQ(Job::open(options).status().code(), StatusCode::kInvalidArgument);
  options.timeout_seconds = 1;
  options.fabric = "local";
  options.num_ranks = 2;
  EXPECT_EQ(Job::open(options).status().code(), StatusCode::kUnsupported);
}

TEST(ThreadsJob, RefusedMemoryIsAnError) {  // F16
  JobOptions options;
  options.num_ranks = 4;
  for (const int64_t heap : {int64_t{1} << 60, INT64_MAX}) {
    options.heap_bytes = heap;
    const auto job = Job::open(options);
    EXPECT_EQ(job.status().code(), StatusCode::kDoesNotFit);
    EXPECT_NE(job.status().message().find("heap of rank 0 of 4, " + std::to_string(heap)), std::string::npos)
        << job.status().message();
  }
}

TEST(ThreadsJob, SignalsPublishPuts) {  // the receiver sees everything put before the signal
  constexpr int kRounds = 20000;
  const auto job = threads_job(2, 4096);
  on_every_rank(2, [&](int rank) {
    Endpoint& e = job->endpoint(rank);
    uint32_t seen = 0;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      if (rank == 0) {
        std::vector<uint32_t> data(16, round);
        ASSERT_TRUE(e.put(1, 64, data.data(), 64).ok());
        ASSERT_TRUE(e.signal(1, 0, round).ok());
        ASSERT_TRUE(e.wait(1, 1, round, 10s, &seen).ok());
      } else {
        ASSERT_TRUE(e.wait(0, 0, round, 10s, &seen).ok());
        const uint32_t* data = reinterpret_cast<const uint32_t*>(e.heap() + 64);
        for (int i = 0; i < 16; ++i) ASSERT_EQ(data[i], round);
        ASSERT_TRUE(e.signal(0, 1, round).ok());
      }
    }
  });
}

TEST(ThreadsJob, CellsCompareModulo2To32AndNeverGoBack) {
  const auto job = threads_job(2, 64, 0xfffffffeu);
  Endpoint &a = job->endpoint(0), &b = job->endpoint(1);
  uint32_t seen = 0;
  EXPECT_TRUE(b.wait(0, 2, 0xfffffffeu, 0s, &seen).ok());
  EXPECT_EQ(b.wait(0, 2, 0xffffffffu, 0s, &seen).code(), StatusCode::kDeadline);
  ASSERT_TRUE(a.signal(1, 2, 1).ok());
  EXPECT_TRUE(b.wait(0, 2, 0xffffffffu, 0s, &seen).ok());
  EXPECT_EQ(seen, 1u);
  ASSERT_TRUE(a.signal(1, 2, 0).ok());  // a late signal
  EXPECT_TRUE(b.wait(0, 2, 1, 0s, &seen).ok());
  EXPECT_EQ(b.wait(0, 2, 2, 0s, &seen).code(), StatusCode::kDeadline);
  EXPECT_EQ(b.wait(0, 3, 1, 0s, &seen).code(), StatusCode::kDeadline);  // another slot
  EXPECT_EQ(b.wait(1, 2, 1, 0s, &seen).code(), StatusCode::kDeadline);  // another source
  EXPECT_EQ(seen, 0xfffffffeu);
}

TEST(ThreadsJob, WaitsEndAtTheirDeadlineAndSleep) {
  const auto job = threads_job(2, 64);
  uint32_t seen = 7;
  timespec before, after;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
  const auto begin = steady_clock::now();
  EXPECT_EQ(job->endpoint(0).wait(1, 0, 1, 300ms, &seen).code(), StatusCode::kDeadline);
  const auto took = steady_clock::now() - begin;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
  EXPECT_GE(took, 300ms);
  EXPECT_LT(took, 1300ms);
  EXPECT_EQ(seen, 0u);
  const double cpu = static_cast<double>(after.tv_sec - before.tv_sec) +
                     1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
  EXPECT_LT(cpu, 0.05);
}

TEST(ThreadsJob, TheFirstFailureReachesEverybody) {
  constexpr int kRanks = 8;
  const auto job = threads_job(kRanks, 64);
  std::atomic<int> waiting{0};
  on_every_rank(kRanks, [&](int rank) {
    Endpoint& e = job->endpoint(rank);
    uint32_t seen = 0;
    if (rank == 3) {
      while (waiting.load() < kRanks - 1) std::this_thread::yield();
      std::this_thread::sleep_for(20ms);
      e.fail(data_loss("first"));
      e.fail(data_loss("second"));
    } else {
      waiting.fetch_add(1);
      const auto begin = steady_clock::now();
      EXPECT_EQ(e.wait(3, 0, 1, 60s, &seen).message(), "first");
      EXPECT_LT(steady_clock::now() - begin, 30s);
    }
    EXPECT_EQ(e.failure().message(), "first");
    EXPECT_EQ(e.put(0, 0, "x", 1).message(), "first");
    EXPECT_EQ(e.signal(0, 0, 1).message(), "first");
    EXPECT_EQ(e.wait(0, 0, 0, 1s, &seen).message(), "first");
  });
}

TEST(ThreadsJob, AbortFailsTheJobAndLogsOneLine) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  const auto job = threads_job(2, 64);
  job->abort(internal_error("rank 1 in dispatch: broken"));
  set_log_sink({});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0], "the job ends: rank 1 in dispatch: broken");
  EXPECT_EQ(job->endpoint(0).failure().message(), "rank 1 in dispatch: broken");
}

using ThreadsJobDeathTest = testing::Test;
TEST(ThreadsJobDeathTest, PutsOutsideTheHeapAreOurMistake) {
  const auto job = threads_job(2, 64);
  EXPECT_DEATH((void)job->endpoint(0).put(1, 60, "12345678", 8), "put of 8 bytes at 60 of a heap of 64");
  EXPECT_DEATH((void)job->endpoint(0).put(1, INT64_MAX, "12345678", 8), "of a heap of 64");
  EXPECT_DEATH((void)job->endpoint(0).put(2, 0, "1", 1), "rank 2 of 2");
  EXPECT_DEATH((void)job->endpoint(0).signal(1, kSignalSlots, 1), "slot 16");
}

}  // namespace
}  // namespace fp4moe
