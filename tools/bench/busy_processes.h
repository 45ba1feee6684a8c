// Processes that only use CPU time, to simulate a machine shared with other users.
#pragma once

#include <sys/types.h>

#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

class BusyProcesses {
 public:
  BusyProcesses() = default;
  ~BusyProcesses();  // kills them
  BusyProcesses(const BusyProcesses&) = delete;
  BusyProcesses& operator=(const BusyProcesses&) = delete;

  // Starts `count` more processes with this process's priority. kDoesNotFit: fork failed.
  Status start(int count);

 private:
  std::vector<pid_t> children_;
};

}  // namespace fp4moe
