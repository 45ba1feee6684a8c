// Fabric: how bytes move between the ranks of a model. fabric.cc has one row per fabric.
#pragma once

#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// The chosen fabric and this process's ranks.
struct Fabric {
  const char* name = "local";
  int rank = 0;       // the first rank of this process
  int num_ranks = 1;  // ranks in the job
};

// name: auto | local | threads | mpi. auto is mpi if a launcher (mpirun, srun) started several processes,
// else threads for more than one rank, else local. kUnsupported if the fabric cannot run num_ranks ranks in
// these processes; the message has the nearest legal choice. kInvalidArgument for an unknown name.
Result<Fabric> make_fabric(std::string_view name, int num_ranks);
// The fabric that `name` selects for num_ranks ranks: auto resolved, any other name unchanged.
std::string_view resolve_fabric(std::string_view name, int num_ranks);

}  // namespace fp4moe
