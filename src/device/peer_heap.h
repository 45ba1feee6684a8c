// PeerHeap: one allocation for each rank of this process, which the GPUs of all these ranks read and write.
// Only these allocations are mapped for peers; all other memory stays private to its GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// Checks whether ranks on these GPUs can share a heap: all GPUs must be of the same model, and each must have
// access to the memory of all the others. kUnsupported names the first pair that differs or has no access.
Status check_peers(std::span<const int> ordinals);

class PeerHeap {
 public:
  // ordinals[r] is the GPU of rank r; ranks may share a GPU. Each rank gets num_bytes, rounded up to the
  // allocation granularity and filled with zeros. Fails as check_peers() does; kDoesNotFit names the rank and
  // the GPU that has too little memory.
  static Result<std::unique_ptr<PeerHeap>> make(std::span<const int> ordinals, int64_t num_bytes);
  ~PeerHeap();
  PeerHeap(const PeerHeap&) = delete;
  PeerHeap& operator=(const PeerHeap&) = delete;

  int num_ranks() const { return static_cast<int>(parts_.size()); }
  int64_t num_bytes() const { return num_bytes_; }  // per rank
  // Returns a rank's device memory: the same address on every GPU of the heap, aligned to at least 64 KiB.
  uint8_t* base(int rank) const { return parts_[static_cast<size_t>(rank)].base; }

 private:
  struct Part {
    uint64_t handle = 0;  // CUmemGenericAllocationHandle; 0: none
    uint8_t* base = nullptr;
    bool is_mapped = false;
  };
  PeerHeap() = default;
  Status add(int ordinal, std::span<const int> ordinals);

  int64_t num_bytes_ = 0;
  std::vector<Part> parts_;
};

}  // namespace fp4moe
