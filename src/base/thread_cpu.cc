#include "base/thread_cpu.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace fp4moe {
namespace {

// Larger than cpu_set_t, because machines can have more CPUs than it holds.
constexpr size_t kMaxCpus = 8192;
struct CpuSet {
  cpu_set_t bits[kMaxCpus / CPU_SETSIZE] = {};
};

// sched_setattr(2); the C library has no declaration of it yet.
struct SchedAttributes {
  uint32_t size = sizeof(SchedAttributes);
  uint32_t policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 300'000;  // ns of a time slice, from Linux 6.12 on
  uint64_t deadline = 0, period = 0;
};
static_assert(sizeof(SchedAttributes) == 48);

bool get_allowed(pid_t id, CpuSet& set) { return ::sched_getaffinity(id, sizeof set, set.bits) == 0; }

}  // namespace

int current_cpu() { return ::sched_getcpu(); }

ThreadCpu ThreadCpu::current() {
  ThreadCpu thread;
  thread.id_ = ::gettid();
  ::pthread_getcpuclockid(::pthread_self(), &thread.clock_);
  return thread;
}

int64_t ThreadCpu::run_nanoseconds() const {
  timespec time = {};
  ::clock_gettime(clock_, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

std::vector<int> ThreadCpu::allowed() const {
  CpuSet set;
  std::vector<int> cpus;
  if (!get_allowed(id_, set)) return cpus;
  for (size_t cpu = 0; cpu < kMaxCpus; ++cpu)
    if (CPU_ISSET_S(cpu, sizeof set, set.bits)) cpus.push_back(static_cast<int>(cpu));
  return cpus;
}

void ThreadCpu::move_to(int cpu) const {
  CpuSet allowed, one;
  if (cpu < 0 || cpu >= static_cast<int>(kMaxCpus) || !get_allowed(id_, allowed)) return;
  if (!CPU_ISSET_S(static_cast<size_t>(cpu), sizeof allowed, allowed.bits)) return;
  CPU_SET_S(static_cast<size_t>(cpu), sizeof one, one.bits);
  ::sched_setaffinity(id_, sizeof one, one.bits);
  ::sched_setaffinity(id_, sizeof allowed, allowed.bits);
}

bool ThreadCpu::lower_priority(int nice) const {
  const auto id = static_cast<id_t>(id_);
  SchedAttributes attributes;
  attributes.nice = std::min(::getpriority(PRIO_PROCESS, id) + nice, 19);
  if (::syscall(SYS_sched_setattr, id_, &attributes, 0U) == 0) return true;
  return ::setpriority(PRIO_PROCESS, id, attributes.nice) == 0;
}

}  // namespace fp4moe
