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
  // Adds `nice` to the thread's nice value, 19 at most. Against one thread that was not lowered, on the same
  // CPU, it then gets about a quarter of the time for 5, a tenth for 10. Where the kernel allows it, its time
  // slices become short, so that it delays others often and little. There is no way back without a privilege.
  // False if the system refuses.
  bool lower_priority(int nice) const;

 private:
  pid_t id_ = 0;
  clockid_t clock_ = 0;
};

}  // namespace fp4moe
