#include <charconv>
#include <cstdlib>
#include <cstring>

#include "comm/job.h"

namespace fp4moe {
namespace {

// Returns the variable's value if it is a decimal number, else -1.
int number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return -1;
  int value = -1;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  return error == std::errc() && stop == end && value >= 0 ? value : -1;
}

}  // namespace

// Tries OpenMPI's mpirun, then PMI launchers (MPICH's mpiexec), then srun. Slurm's variables count only
// inside a job step; outside a step they describe the allocation.
LauncherInfo launcher_info() {
  struct Variables {
    const char *process, *num_processes, *local_processes, *needs;
  };
  constexpr Variables kLaunchers[] = {
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr},
      {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", nullptr},
      {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_ID"}};
  for (const Variables& v : kLaunchers) {
    const int process = number_in(v.process), num_processes = number_in(v.num_processes);
    if (v.needs != nullptr && std::getenv(v.needs) == nullptr) continue;
    if (process < 0 || process >= num_processes) continue;
    const int local = number_in(v.local_processes);
    return {true, process, num_processes, local > 0 && local <= num_processes ? local : num_processes};
  }
  return {};
}

}  // namespace fp4moe
