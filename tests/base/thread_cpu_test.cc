#include "base/thread_cpu.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace fp4moe {
namespace {

// A thread that continuously records its current CPU.
class Spinner {
 public:
  Spinner() : thread_([this] { spin(); }) {
    while (!started_.load()) std::this_thread::yield();
  }
  ~Spinner() {
    stop_ = true;
    thread_.join();
  }
  const ThreadCpu& thread() const { return self_; }
  bool comes_to(int cpu) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (cpu_ != cpu && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return cpu_ == cpu;
  }

 private:
  void spin() {
    self_ = ThreadCpu::current();
    started_ = true;
    while (!stop_) cpu_ = current_cpu();
  }
  ThreadCpu self_;
  std::atomic<bool> started_{false}, stop_{false};
  std::atomic<int> cpu_{-1};
  std::thread thread_;
};

TEST(ThreadCpu, ItsCpuIsAnAllowedOne) {
  const std::vector<int> cpus = ThreadCpu::current().allowed();
  ASSERT_FALSE(cpus.empty());
  EXPECT_TRUE(std::is_sorted(cpus.begin(), cpus.end()));
  EXPECT_EQ(std::count(cpus.begin(), cpus.end(), current_cpu()), 1);
}

TEST(ThreadCpu, MovesWhereItIsToldAndMayGoAnywhereAfterwards) {
  const Spinner spinner;
  const std::vector<int> cpus = spinner.thread().allowed();
  for (int round = 0; round < 20; ++round) {
    const int cpu = cpus[static_cast<size_t>(round) % cpus.size()];
    // The kernel can migrate the thread again immediately, so retry.
    bool came = false;
    for (int i = 0; i < 100 && !came; ++i) {
      spinner.thread().move_to(cpu);
      came = spinner.comes_to(cpu);
    }
    EXPECT_TRUE(came) << "round " << round << ", CPU " << cpu;
    ASSERT_EQ(spinner.thread().allowed(), cpus);
  }
}

TEST(ThreadCpu, ACpuThatItMayNotUseChangesNothing) {
  const Spinner spinner;
  const std::vector<int> cpus = spinner.thread().allowed();
  for (const int cpu : {-1, cpus.back() + 1, 8191, 8192, 1 << 30}) {
    spinner.thread().move_to(cpu);
    EXPECT_EQ(spinner.thread().allowed(), cpus) << cpu;
  }
}

TEST(ThreadCpu, TimeStandsStillWhileItSleeps) {
  std::atomic<bool> started{false}, stop{false};
  ThreadCpu sleeper;
  std::thread thread([&] {
    sleeper = ThreadCpu::current();
    started = true;
    started.notify_one();
    stop.wait(false);
  });
  started.wait(false);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the sleeper is asleep by now
  const int64_t slept = sleeper.run_nanoseconds();
  const Spinner spinner;
  const int64_t ran = spinner.thread().run_nanoseconds();
  while (spinner.thread().run_nanoseconds() < ran + 1'000'000) std::this_thread::yield();
  EXPECT_EQ(sleeper.run_nanoseconds(), slept);
  stop = true;
  stop.notify_one();
  thread.join();
}

int own_nice() { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); }

TEST(ThreadCpu, ALowPriorityIsTheThreadsAlone) {
  const Spinner spinner;
  ASSERT_TRUE(spinner.thread().lower_priority(10));
  const int before = own_nice();
  std::atomic<int> nice{-1};
  std::thread([&] {
    ASSERT_TRUE(ThreadCpu::current().lower_priority(12));
    nice = own_nice();
  }).join();
  EXPECT_EQ(nice, std::min(before + 12, 19));
  EXPECT_EQ(own_nice(), before);
}

}  // namespace
}  // namespace fp4moe
