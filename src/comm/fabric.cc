#include "comm/fabric.h"

#include <string>

namespace fp4moe {
namespace {

struct FabricRow {
  const char* name;
  int max_ranks;  // 0: known, but not built in this version
};

constexpr FabricRow kFabrics[] = {
    {"local", 1},
    {"threads", 0},
    {"mpi", 0},
};

}  // namespace

Result<Fabric> make_fabric(std::string_view name, int num_ranks) {
  const std::string ranks = std::to_string(num_ranks);
  if (num_ranks < 1) return invalid_argument("fabric: num_ranks=" + ranks + " must be at least 1");
  for (const FabricRow& row : kFabrics) {
    if (name == "auto" ? num_ranks <= row.max_ranks : name == row.name && num_ranks <= row.max_ranks)
      return Fabric{row.name, 0, num_ranks};
    if (name != row.name) continue;
    const std::string forced = "fabric=" + std::string(name);
    if (row.max_ranks == 0)
      return unsupported(forced + " is not built in this version; nearest legal choice: --fabric local");
    return unsupported(forced + " carries " + std::to_string(row.max_ranks) + " rank, but tp=" + ranks +
                       " asks for " + ranks + "; nearest legal choice: --tp 1");
  }
  if (name == "auto")
    return unsupported("fabric=auto: no fabric built in this version carries tp=" + ranks +
                       " ranks; nearest legal choice: --tp 1");
  return invalid_argument("unknown fabric '" + std::string(name) + "': auto, local, threads or mpi");
}

}  // namespace fp4moe
