#include "bench/busy_processes.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace fp4moe {

Status BusyProcesses::start(int count) {
  const pid_t parent = ::getpid();
  for (int i = 0; i < count; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the child ends when the parent ends, for any reason
      for (volatile bool busy = ::getppid() == parent; busy;) continue;
      ::_exit(0);
    }
    if (child < 0) return does_not_fit(std::string("cannot start a busy process: ") + std::strerror(errno));
    children_.push_back(child);
  }
  return {};
}

BusyProcesses::~BusyProcesses() {
  for (const pid_t child : children_) ::kill(child, SIGKILL);
  for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
}

}  // namespace fp4moe
