// NCCL's all-reduce and all-gather between the GPUs of this process, to compare our kernels with.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

class NcclPeer {
 public:
  // Creates one rank on each of these GPUs. kUnsupported: Nccl::open() refuses the library, or two ranks
  // share a GPU, which NCCL does not support.
  static Result<std::unique_ptr<NcclPeer>> make(std::span<const int> ordinals);
  virtual ~NcclPeer() = default;

  // Each enqueues the part of rank `rank` on `stream`; all pointers are to memory of that rank's GPU. The
  // first calls of each kind must be made for all ranks between begin() and end(). data [n] f32 = the sum
  // over ranks.
  virtual Status all_reduce(int rank, float* data, int64_t n, StreamHandle stream) const = 0;
  // out [ranks, num_bytes] = each rank's `mine`.
  virtual Status all_gather(int rank, const void* mine, int64_t num_bytes, void* out,
                            StreamHandle stream) const = 0;
  virtual Status begin() const = 0;
  virtual Status end() const = 0;
};

}  // namespace fp4moe
