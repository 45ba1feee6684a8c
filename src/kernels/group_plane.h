// GroupPlane: moves bytes between the ranks of a group that do not share memory, because they belong to
// different processes (comm/nccl_plane.h). The operations of device_comm.h and device_a2a.h then stage what
// they exchange in their own region, and have the same bits as with shared memory.
#pragma once

#include <cstdint>
#include <span>

#include "fp4moe/status.h"

namespace fp4moe {

struct CommOp;

// What this rank exchanges with another one; device memory. A rank's n-th transfer with a peer belongs to the
// peer's n-th transfer with the rank, and what one of them sends has the size that the other receives.
struct PlaneTransfer {
  int peer = 0;
  const void* send = nullptr;
  int64_t send_bytes = 0;
  void* receive = nullptr;
  int64_t receive_bytes = 0;
};

class GroupPlane {
 public:
  virtual ~GroupPlane() = default;
  // Enqueues the transfers on the current stream as one operation; all ranks of the group call it, in the
  // same order. `peer` is a rank of the group.
  virtual void exchange(const CommOp& op, std::span<const PlaneTransfer> transfers) const = 0;
  // Returns OK, or why no further exchange can run. Thread-safe.
  virtual Status failure() const = 0;
};

}  // namespace fp4moe
