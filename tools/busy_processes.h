// Processes that only compute: what an engine meets on a machine that others use too.
#pragma once

#include <sys/types.h>

#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

class BusyProcesses {
 public:
  BusyProcesses() = default;
  ~BusyProcesses();  // ends them
  BusyProcesses(const BusyProcesses&) = delete;
  BusyProcesses& operator=(const BusyProcesses&) = delete;

  // `count` more, of this process's priority. kDoesNotFit: the system refuses one.
  Status start(int count);

 private:
  std::vector<pid_t> children_;
};

}  // namespace fp4moe
