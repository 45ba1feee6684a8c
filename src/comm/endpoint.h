// Endpoint: one rank's interface to a fabric: a symmetric heap (the same size on every rank), puts into
// peers' heaps, and signal cells that order and announce puts. The fabrics implement it.
#pragma once

#include <chrono>
#include <cstdint>

#include "fp4moe/status.h"

namespace fp4moe {

// Signal cells per (source, destination) pair. Their slots are assigned here, so that no two users collide:
//   0..3    the communicator of all ranks, which the MoE transports use too
//   4..7    the communicator of the attention group (tensor parallelism inside a data-parallel group)
//   8..11   unused
//   12..15  the engine's steps
constexpr int kSignalSlots = 16;

// Only the rank's thread may call an endpoint, except for fail() and failure(), which any thread may call.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // This rank's heap, 64-byte aligned. Peers write to it with put(); a signal announces that the data may be
  // read.
  virtual uint8_t* heap() const = 0;
  virtual int64_t heap_bytes() const = 0;

  // Copies num_bytes to `offset` in dst's heap (dst may be this rank); src may be reused on return. The data
  // is visible to dst no later than the next signal() to it. Returns the job's failure if the job has failed.
  virtual Status put(int dst, int64_t offset, const void* src, int64_t num_bytes) = 0;
  // Stores `value` in dst's cell (this rank, slot), after all earlier puts to dst (release). Cells only grow
  // (modulo 2^32): an older value has no effect.
  virtual Status signal(int dst, int slot, uint32_t value) = 0;
  // Waits until this rank's cell (src, slot) has reached `value` (compared modulo 2^32, acquire), and stores
  // the cell's last value in `seen`. Spins briefly, then sleeps. Returns kDeadline after `timeout`, with a
  // message to which the caller adds the details, or the job's failure once any rank has called fail().
  virtual Status wait(int src, int slot, uint32_t value, std::chrono::nanoseconds timeout,
                      uint32_t* seen) = 0;
  // Ends the job: every pending and later call on every rank returns `status`. The first failure wins.
  virtual void fail(const Status& status) = 0;
  virtual Status failure() const = 0;  // OK while the job runs
  // Whether all ranks are in one process, so that each can use the others' addresses.
  virtual bool shares_addresses() const { return false; }
  // Returns the rank for whose signal the given rank sleeps; -1 if it does not sleep, or if this is unknown.
  // Used only in messages.
  virtual int waits_for(int) const { return -1; }
};

}  // namespace fp4moe
