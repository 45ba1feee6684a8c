// Which CPU a thread is on, and whether it is being run at all.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <ctime>
#include <vector>

namespace fp4moe {

int current_cpu();

// A thread of this process that lives.
class ThreadCpu {
 public:
  ThreadCpu() = default;  // none
  static ThreadCpu current();

  // How long it has run. It stands still while the thread sleeps, or waits for a CPU.
  int64_t run_nanoseconds() const;
  // The CPUs that it may use (taskset, cgroup cpusets), ascending; empty if the system does not say.
  std::vector<int> allowed() const;
  // Puts it on that CPU, if it may use it; where it may run later is left as it was. Not for two callers at a
  // time.
  void move_to(int cpu) const;
  // Makes the thread run only on CPU time that no other thread wants (SCHED_IDLE). There is no way back:
  // raising a priority takes a privilege. False, and nothing was done, if the system refuses.
  bool lower_priority() const;

 private:
  pid_t id_ = 0;
  clockid_t clock_ = 0;
};

}  // namespace fp4moe
