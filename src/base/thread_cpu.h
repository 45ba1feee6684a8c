// Which CPU a thread runs on, and how long it has run.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <vector>

namespace fp4moe {

int current_cpu();

// Handle of a live thread of this process.
class ThreadCpu {
 public:
  ThreadCpu() = default;  // no thread
  static ThreadCpu current();

  // CPU time of the thread; it does not advance while the thread sleeps or waits for a CPU.
  int64_t run_nanoseconds() const;
  // The CPUs that it may use (taskset, cgroup cpusets), ascending; empty if unknown.
  std::vector<int> allowed() const;
  // Migrates the thread to `cpu` if it is allowed there, without changing its affinity. One caller at a time.
  void move_to(int cpu) const;
  // Makes the thread run only on CPU time that no other thread wants (SCHED_IDLE). This cannot be undone
  // without privileges. False, without any effect, if the system refuses.
  bool lower_priority() const;

 private:
  pid_t id_ = 0;
  clockid_t clock_ = 0;
};

}  // namespace fp4moe
