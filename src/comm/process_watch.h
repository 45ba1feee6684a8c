// ProcessWatch: detects at once that another process on this machine has ended, for any reason.
#pragma once

#include <cstdint>
#include <vector>

namespace fp4moe {

// Returns an id that is equal in two processes if they run on the same machine in the same pid namespace; 0
// if unknown.
uint64_t pid_space_id();

class ProcessWatch {
 public:
  ProcessWatch() = default;
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Watches pid, which must be in this pid namespace; first_ended() returns `name` for it. If the kernel
  // refuses (no pidfd), the process is not watched.
  void add(int name, int64_t pid);
  void remove(int name);
  // Returns the name of a process that has ended, or -1. Does not block.
  int first_ended() const;

 private:
  struct Watched {
    int name;
    int fd;  // -1: the process had ended before it was added
  };
  std::vector<Watched> watched_;
};

}  // namespace fp4moe
