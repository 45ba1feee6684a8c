#include "thread_stacks.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstddef>
#include <thread>

namespace fp4moe {

namespace {

constexpr size_t kLeastStackBytes = 1 << 20;  // attention with AVX-512 needs between 128 and 256 KiB

void raise_default_stack() {
  pthread_attr_t attributes;
  if (pthread_getattr_default_np(&attributes) != 0) return;
  size_t num_bytes = 0;
  if (pthread_attr_getstacksize(&attributes, &num_bytes) == 0 && num_bytes < kLeastStackBytes &&
      pthread_attr_setstacksize(&attributes, kLeastStackBytes) == 0)
    pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
}

// Returns whether the main thread's stack may grow to kLeastStackBytes. The kernel reads the limit when the
// stack grows.
bool raise_main_stack() {
  rlimit limit{};
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= kLeastStackBytes) return true;
  limit.rlim_cur = kLeastStackBytes;
  return limit.rlim_max >= kLeastStackBytes && setrlimit(RLIMIT_STACK, &limit) == 0;
}

}  // namespace

int run_with_large_stacks(const std::function<int()>& program) {
  raise_default_stack();
  if (raise_main_stack()) return program();
  sigset_t all, before;  // signals are for the program's thread
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int result = 0;
  std::thread([&] {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    result = program();
  }).join();
  return result;
}

}  // namespace fp4moe
