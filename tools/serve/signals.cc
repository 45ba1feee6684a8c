#include "serve/signals.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <future>

#include "server/http/server_url.h"

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

void return_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
  mallopt(M_ARENA_MAX, 4);
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

void drain_unless_signalled(const sigset_t& set, const LogSink& log, const std::function<void()>& drain) {
  constexpr int kInterrupted = 130;
  // timeout(1) signals both the server and its process group, and wrappers forward a terminal's Ctrl-C to a
  // child that has already received it. A second signal within this time is therefore treated as a duplicate.
  constexpr auto kSameSignal = std::chrono::milliseconds(500);
  using Clock = std::chrono::steady_clock;
  log(LogLevel::kInfo, "shutting down: finishing running requests; a second signal aborts them");
  auto drained = std::async(std::launch::async, drain);
  const Clock::time_point first = Clock::now();
  while (drained.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
    if (signalled(set) && Clock::now() - first > kSameSignal) _exit(kInterrupted);
}

bool is_unix_socket(const std::string& host) { return host.rfind("unix:", 0) == 0; }

std::string url_to_announce(const std::string& host, int port, const LogSink& log) {
  if (!is_unix_socket(host)) return "http://" + url_host(host) + ":" + std::to_string(port);
  log(LogLevel::kInfo, "listening on " + host);
  return "http://localhost";
}

}  // namespace fp4moe
