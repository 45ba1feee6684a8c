// A thread's CPU time, CPU affinity and priority.
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
  // The CPUs that the thread may use (taskset, cgroup cpusets), ascending; empty if unknown.
  std::vector<int> allowed() const;
  // Migrates the thread to `cpu` if it is allowed there, without changing its affinity. One caller at a time.
  void move_to(int cpu) const;
  // Adds `nice` to the thread's nice value, up to 19. If the thread shares a CPU with one thread of unchanged
  // priority, it gets about a quarter of the CPU time for nice = 5 and a tenth for nice = 10. Where the
  // kernel supports it, its time slices also become short, so that each delay of another thread is short.
  // Raising the priority again needs a privilege. Returns false if the system refuses.
  bool lower_priority(int nice) const;

 private:
  pid_t id_ = 0;
  clockid_t clock_ = 0;
};

}  // namespace fp4moe
