// Endpoint: one rank's interface to a fabric: a symmetric heap (the same size on every rank), puts into
// peers' heaps, and signal cells that order and announce puts. The fabrics implement it.
#pragma once

#include <chrono>
#include <cstdint>

#include "fp4moe/status.h"

namespace fp4moe {

// Signal cells of one (source, destination) pair. Slots are assigned here, so that uses do not collide:
//   0..3    the communicator of all ranks, which the MoE transports use too
//   4..7    the communicator of the attention group (tensor parallelism inside a data-parallel group)
//   8..11   unused
//   12..15  the engine's steps
constexpr int kSignalSlots = 16;

// Used by the rank's thread only, except fail() and failure(), which any thread may call.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // This rank's heap, 64-byte aligned. Peers write to it with put(); signals announce when data may be read.
  virtual uint8_t* heap() const = 0;
  virtual int64_t heap_bytes() const = 0;

  // Copies num_bytes to `offset` in dst's heap (dst may be this rank); src may be reused on return. The data
  // is visible to dst no later than the next signal() to it. Returns the job's failure once there is one.
  virtual Status put(int dst, int64_t offset, const void* src, int64_t num_bytes) = 0;
  // Stores `value` in the cell (this rank, slot) of dst, after all earlier puts to it (release). Cells only
  // grow (modulo 2^32): an older value has no effect.
  virtual Status signal(int dst, int slot, uint32_t value) = 0;
  // Waits until this rank's cell (src, slot) is `value` or later (compared modulo 2^32), with acquire; `seen`
  // gets the cell's last value. Spins briefly, then sleeps. kDeadline after `timeout`, without details, which
  // the caller adds; the job's failure once any rank has called fail().
  virtual Status wait(int src, int slot, uint32_t value, std::chrono::nanoseconds timeout,
                      uint32_t* seen) = 0;
  // Ends the job: every pending and later call on every rank returns `status`. The first failure wins.
  virtual void fail(const Status& status) = 0;
  virtual Status failure() const = 0;  // OK while the job runs
  // For messages: the rank for which a rank sleeps now; -1 if it does not sleep, or if unknown.
  virtual int waits_for(int) const { return -1; }
};

}  // namespace fp4moe
