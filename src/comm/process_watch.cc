#include "comm/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>

#include "base/hash.h"

namespace fp4moe {

uint64_t pid_space_id() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char space[64] = "";
  const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space);
  if (boot.empty() || length <= 0) return 0;
  const std::string text = boot + "/" + std::string(space, static_cast<size_t>(length));
  return hash64(text.data(), static_cast<int64_t>(text.size()));
}

ProcessWatch::~ProcessWatch() {
  for (const Watched& w : watched_)
    if (w.fd >= 0) close(w.fd);
}

void ProcessWatch::add(int name, int64_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
  if (fd >= 0 || errno == ESRCH) watched_.push_back({name, fd});
}

void ProcessWatch::remove(int name) {
  const auto it =
      std::find_if(watched_.begin(), watched_.end(), [&](const Watched& w) { return w.name == name; });
  if (it == watched_.end()) return;
  if (it->fd >= 0) close(it->fd);
  watched_.erase(it);
}

int ProcessWatch::first_ended() const {
  for (const Watched& w : watched_) {
    pollfd fd = {w.fd, POLLIN, 0};
    if (w.fd < 0 || poll(&fd, 1, 0) == 1) return w.name;
  }
  return -1;
}

}  // namespace fp4moe
