#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/run_ranges.h"
#include "base/thread_cpu.h"

namespace fp4moe {
namespace {

class ThreadPoolOf : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolOf, RunsEveryChunkOnce) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.num_threads(), GetParam());
  for (int64_t chunks : {0, 1, 2, 3, 7, 100, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(chunks));
    std::atomic<bool> workers_in_range{true};
    pool.run(chunks, [&](int64_t chunk, int worker) {
      ++calls[static_cast<size_t>(chunk)];
      if (worker < 0 || worker >= pool.num_threads()) workers_in_range = false;
    });
    for (auto& n : calls) EXPECT_EQ(n, 1);
    EXPECT_TRUE(workers_in_range);
  }
}

TEST_P(ThreadPoolOf, RunsEveryChunkOfStreamsOnce) {
  ThreadPool pool(GetParam());
  for (int64_t chunks = 0; chunks < 30; ++chunks) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(chunks));
    run_in_streams(pool, chunks, [&](int64_t chunk) { ++calls.at(static_cast<size_t>(chunk)); });
    for (auto& n : calls) EXPECT_EQ(n, 1);
  }
}

// The caller gets one of the exceptions; chunks that had begun are complete, and the pool runs loops as
// before.
TEST_P(ThreadPoolOf, ThrowsWhatAChunkThrows) {
  ThreadPool pool(GetParam());
  for (int64_t bad = 0; bad < 50; ++bad) {
    std::atomic<int64_t> begun{0}, ended{0};
    try {
      pool.run(50, [&](int64_t chunk, int) {
        ++begun;
        if (chunk >= bad) throw std::runtime_error("chunk " + std::to_string(chunk));
        ++ended;
      });
      ADD_FAILURE() << "nothing was thrown from chunk " << bad;
    } catch (const std::runtime_error& error) {
      EXPECT_GE(std::stoll(std::string(error.what()).substr(6)), bad);
    }
    EXPECT_EQ(ended, bad);
    EXPECT_LE(begun, bad + GetParam());  // each worker throws at most once
    std::atomic<int64_t> sum{0};
    pool.run(50, [&](int64_t chunk, int) { sum += chunk; });
    EXPECT_EQ(sum, 49 * 50 / 2);
  }
}

// A loop's unsynchronised writes are visible to the next loop and to the caller.
TEST_P(ThreadPoolOf, LoopsFollowEachOther) {
  ThreadPool pool(GetParam());
  std::vector<int> before(17), after(17);
  for (int round = 0; round < 3000; ++round) {
    pool.run(17, [&](int64_t chunk, int) { after[chunk] = before[(chunk + round) % 17] + 1; });
    std::swap(before, after);
  }
  EXPECT_EQ(before, std::vector<int>(17, 3000));
}

TEST_P(ThreadPoolOf, OneWorkerIsNeverInTwoChunks) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> inside(static_cast<size_t>(GetParam()));
  std::atomic<bool> overlapped{false};
  pool.run(500, [&](int64_t, int worker) {
    if (++inside[static_cast<size_t>(worker)] != 1) overlapped = true;
    std::this_thread::yield();
    --inside[static_cast<size_t>(worker)];
  });
  EXPECT_FALSE(overlapped);
}

// Pauses longer than the spin time put workers to sleep; the next loop must wake them.
TEST_P(ThreadPoolOf, SleepersWakeUp) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round * 50));
    std::atomic<int> calls{0};
    pool.run(10, [&](int64_t, int) { ++calls; });
    ASSERT_EQ(calls, 10);
  }
}

TEST_P(ThreadPoolOf, StartsAndStopsIdle) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(GetParam());
}

TEST_P(ThreadPoolOf, PoolsDoNotDisturbEachOther) {
  std::vector<std::thread> ranks;
  std::atomic<int64_t> total{0};
  for (int r = 0; r < 3; ++r)
    ranks.emplace_back([&] {
      ThreadPool pool(GetParam());
      for (int i = 0; i < 200; ++i) pool.run(5, [&](int64_t chunk, int) { total += chunk; });
    });
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(total, 3 * 200 * 10);
}

// Threads that keep every core busy.
class BusyThreads {
 public:
  BusyThreads() {
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i)
      threads_.emplace_back([this] {
        while (!stop_) continue;
      });
  }
  ~BusyThreads() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// Workers lose their cores in the middle of chunks, and the pool moves them to the caller's CPU. No chunk is
// lost or run twice, and each thread's allowed CPUs are restored afterwards.
TEST_P(ThreadPoolOf, LoopsBesideBusyThreads) {
  const BusyThreads busy;
  const std::vector<int> cpus = ThreadCpu::current().allowed();
  ThreadPool pool(GetParam());
  std::vector<ThreadCpu> threads(static_cast<size_t>(GetParam()), ThreadCpu::current());
  std::vector<int64_t> sums(64);
  constexpr int kRounds = 300;
  for (int round = 0; round < kRounds; ++round)
    pool.run(std::ssize(sums), [&](int64_t chunk, int worker) {
      int64_t sum = 0;
      for (int i = 0; i < 2000; ++i) {
        sum += i;
        asm volatile("" : "+r"(sum));  // keeps the loop from being optimised away
      }
      sums[static_cast<size_t>(chunk)] += sum;
      threads[static_cast<size_t>(worker)] = ThreadCpu::current();
    });
  EXPECT_EQ(sums, std::vector<int64_t>(sums.size(), int64_t{kRounds} * 1999 * 2000 / 2));
  for (const ThreadCpu& thread : threads) {  // a worker can still be moving back
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (thread.allowed() != cpus && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(thread.allowed(), cpus);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOf, testing::Values(1, 2, 3, 7));

// Two chunks that wait for each other finish only if two threads run them.
TEST(ThreadPool, WorkersRunAtTheSameTime) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  pool.run(2, [&](int64_t, int) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPoolDeathTest, NeedsAThread) { EXPECT_DEATH(ThreadPool(0), "num_threads=0"); }

}  // namespace
}  // namespace fp4moe
