#include "signals.h"

#include <sys/resource.h>

#include <chrono>

namespace fp4moe {

LogLevel least_level(const std::string& name) {
  return name == "debug"     ? LogLevel::kDebug
         : name == "warning" ? LogLevel::kWarning
         : name == "error"   ? LogLevel::kError
                             : LogLevel::kInfo;
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

sigset_t block_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  return set;
}

bool signalled(const sigset_t& set) {
  constexpr auto kTick = std::chrono::milliseconds(100);
  const timespec wait{0, std::chrono::nanoseconds(kTick).count()};
  return sigtimedwait(&set, nullptr, &wait) > 0;
}

}  // namespace fp4moe
