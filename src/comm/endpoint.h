// Endpoint: one rank's end of a fabric. A symmetric heap (the same size on every rank), puts into it, and
// signal cells that order and announce them. local, threads and mpi implement it; everything above is written
// once against it.
#pragma once

#include <chrono>
#include <cstdint>

#include "fp4moe/status.h"

namespace fp4moe {

// Cells of one (source, destination) pair. Who uses which slot is fixed here, so that no two uses collide:
//   0..3    the communicator of all ranks
//   4..7    the communicator of the attention group (tensor parallelism inside a data-parallel group)
//   8..11   the MoE transports' communicator
//   12..15  the engine's steps
constexpr int kSignalSlots = 16;

// Used by one thread at a time, the rank's; only fail() and failure() may come from any thread.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // This rank's heap, 64-byte aligned. Peers write it with put(); what may be read when is said by signals.
  virtual uint8_t* heap() const = 0;
  virtual int64_t heap_bytes() const = 0;

  // Copies num_bytes to `offset` of dst's heap (dst may be this rank); src may be reused on return. Visible
  // to dst at the latest with the next signal() to it. An error of the job comes back as its Status.
  virtual Status put(int dst, int64_t offset, const void* src, int64_t num_bytes) = 0;
  // Stores `value` in the cell (this rank, slot) of dst, after all earlier puts to it (release). Cells only
  // grow (modulo 2^32): a value behind the cell's changes nothing.
  virtual Status signal(int dst, int slot, uint32_t value) = 0;
  // Returns the cell (src, slot) of this rank once it is `value` or later (compared modulo 2^32), with
  // acquire. Spins briefly, then sleeps. kDeadlineExceeded after `timeout` (what was expected and seen is the
  // caller's to say; the cell's last value is in `seen`), or the job's Status once any rank has called
  // fail().
  virtual Status wait(int src, int slot, uint32_t value, std::chrono::nanoseconds timeout,
                      uint32_t* seen) = 0;
  // Ends the job: every present and later call on every rank returns `status`. The first one wins.
  virtual void fail(const Status& status) = 0;
  virtual Status failure() const = 0;  // OK while the job lives
  // For messages: whom a rank sleeps for now, -1 if for none or if that is not known here.
  virtual int waits_for(int) const { return -1; }
};

}  // namespace fp4moe
