// GroupPlane: moves bytes between the ranks of a group whose GPUs do not map each other's memory, because
// they belong to different processes (comm/nccl_plane.h). The operations of device_comm.h and device_a2a.h
// then put what other ranks need into staging areas of their own region, and add or copy what arrived there,
// with the bits of a group with shared memory.
#pragma once

#include <cstdint>
#include <span>

#include "fp4moe/status.h"

namespace fp4moe {

struct CommOp;

// What this rank exchanges with one other rank: device memory, which must not overlap any other receive. The
// peer's receive_bytes of its transfer in the same place of its list for this rank is send_bytes.
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
