// MoveArea: the memory through which experts move between the ranks of one process.
#pragma once

#include <cstdint>
#include <vector>

namespace fp4moe {

struct MoveArea {
  // Each rank's part, which every rank can write; empty: parts in host memory, which ExpertMover allocates.
  std::vector<uint8_t*> of_rank;
  int64_t num_bytes = int64_t{8} << 20;  // of each part; on a CPU, little enough for the caches
};

}  // namespace fp4moe
