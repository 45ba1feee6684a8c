#include "comm/fabric.h"

#include <string>

#include "comm/job.h"

namespace fp4moe {
namespace {

Status refuse(const std::string& what, const std::string& why, const std::string& legal) {
  return unsupported(what + " " + why + "; nearest legal choice: " + legal);
}

// All ranks are in this process, so it must be the only process.
Status check_single(const std::string& forced, const LauncherInfo& launcher) {
  if (launcher.num_processes == 1) return {};
  return refuse(forced,
                "runs in one process, but the launcher started " + std::to_string(launcher.num_processes),
                "--fabric mpi");
}

Status check_local(const std::string& forced, int num_ranks, const LauncherInfo& launcher) {
  const std::string ranks = std::to_string(num_ranks);
  if (num_ranks > 1)
    return refuse(forced, "has only 1 rank, but tp=" + ranks + " needs " + ranks, "--fabric threads");
  return check_single(forced, launcher);
}

Status check_threads(const std::string& forced, int, const LauncherInfo& launcher) {
  return check_single(forced, launcher);
}

Status check_mpi(const std::string& forced, int num_ranks, const LauncherInfo& launcher) {
  if (!launcher.launched)
    return refuse(forced, "needs mpirun or srun, and neither started this process",
                  num_ranks == 1 ? "--fabric local" : "--fabric threads");
  const int processes = launcher.num_processes;
  if (num_ranks % processes == 0) return {};
  const int more = (num_ranks / processes + 1) * processes;
  return refuse("tp=" + std::to_string(num_ranks),
                "does not split evenly over the " + std::to_string(processes) + " processes of the launcher",
                "--tp " + std::to_string(more));
}

struct FabricRow {
  const char* name;
  Status (*check)(const std::string& forced, int num_ranks, const LauncherInfo& launcher);
};

constexpr FabricRow kFabrics[] = {{"local", check_local}, {"threads", check_threads}, {"mpi", check_mpi}};

std::string_view automatic(int num_ranks, const LauncherInfo& launcher) {
  if (launcher.num_processes > 1) return "mpi";
  return num_ranks > 1 ? "threads" : "local";
}

}  // namespace

std::string_view resolve_fabric(std::string_view name, int num_ranks) {
  return name == "auto" ? automatic(num_ranks, launcher_info()) : name;
}

Result<Fabric> make_fabric(std::string_view name, int num_ranks) {
  if (num_ranks < 1)
    return invalid_argument("fabric: num_ranks=" + std::to_string(num_ranks) + " must be at least 1");
  const LauncherInfo launcher = launcher_info();
  const std::string_view wanted = resolve_fabric(name, num_ranks);
  for (const FabricRow& row : kFabrics) {
    if (wanted != row.name) continue;
    const Status status = row.check("fabric=" + std::string(wanted), num_ranks, launcher);
    if (!status.ok()) return status;
    const bool many = wanted == "mpi";
    return Fabric{row.name, many ? launcher.process * (num_ranks / launcher.num_processes) : 0, num_ranks};
  }
  return invalid_argument("unknown fabric '" + std::string(name) + "'; use auto, local, threads or mpi");
}

}  // namespace fp4moe
