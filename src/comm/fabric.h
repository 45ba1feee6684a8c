// Fabric: how bytes move between the ranks of a model. One row per fabric in fabric.cc.
#pragma once

#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// This process's place among the ranks.
struct Fabric {
  const char* name = "local";
  int rank = 0;  // the first of this process
  int num_ranks = 1;
};

// auto | local | threads | mpi for `num_ranks` ranks. auto is mpi where a launcher (mpirun, srun) started
// several processes, else threads for more than one rank, else local. kUnsupported where the fabric cannot
// carry these ranks in these processes, naming the nearest legal choice; kInvalidArgument for an unknown
// name.
Result<Fabric> make_fabric(std::string_view name, int num_ranks);

}  // namespace fp4moe
