// ProcessWatch: sees at once that another process of this machine has ended, whatever ended it.
#pragma once

#include <cstdint>
#include <vector>

namespace fp4moe {

// Same value: the same machine, and process numbers that mean the same. 0: unknown.
uint64_t pid_space_id();

class ProcessWatch {
 public:
  ProcessWatch() = default;
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Watches pid, which is in this pid space; `name` is what first_ended() returns for it. Where the kernel
  // refuses, it is not watched.
  void add(int name, int64_t pid);
  void remove(int name);
  // The name of one that has ended, or -1; does not wait.
  int first_ended() const;

 private:
  struct Watched {
    int name;
    int fd;  // -1: had ended when it was added
  };
  std::vector<Watched> watched_;
};

}  // namespace fp4moe
