// Communicator: a group of consecutive ranks that do the same operations in the same order. Every operation
// has an epoch and names itself, so that ranks that disagree find out at the first message.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "comm/endpoint.h"

namespace fp4moe {

// What an operation is, for agreement and for messages.
struct OpName {
  const char* op = "";    // "dispatch", "all_reduce", ...
  int layer = -1;         // -1: not of a layer
  uint32_t geometry = 0;  // hash of what all ranks must agree on (sizes, dtypes, layouts): geometry_hash()
};

// FNV-1a over the numbers.
uint32_t geometry_hash(std::span<const int64_t> numbers);

// No deadline: only a signal or the job's failure ends the wait.
constexpr std::chrono::nanoseconds kNoDeadline = std::chrono::nanoseconds::max();

struct CommOptions {
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);
  uint32_t first_epoch = 1;  // the job's first_signal + 1; tests start near 2^32 to see it wrap
  bool checksum = false;     // verifies what the collectives carry; exchange() always does
};

// How long this rank has waited for a peer.
struct WaitStats {
  int64_t waits = 0;  // that did not find their signal there
  std::chrono::nanoseconds total{0}, longest{0};
};

// Memory of one communicator in the symmetric heap, the same on every rank.
struct CommRegion {
  int64_t offset = 0;         // in the heap, 64-byte aligned
  int64_t record_bytes = 0;   // largest record of exchange(), per rank
  int64_t staging_bytes = 0;  // for the collectives; larger operands pass through it in pieces
  int first_slot = 0;         // uses kCommSlots slots from here
};
constexpr int kCommSlots = 4;

class Communicator {
 public:
  // Heap bytes that a region of these sizes takes.
  static int64_t heap_bytes(int num_ranks, int64_t record_bytes, int64_t staging_bytes);

  // The ranks [first_rank, first_rank + num_ranks) of the endpoint's job, this rank among them. The endpoint
  // is borrowed.
  Communicator(Endpoint& endpoint, int first_rank, int num_ranks, const CommRegion& region,
               const CommOptions& options);
  ~Communicator();

  int rank() const;  // in the group
  int size() const;
  Endpoint& endpoint() const;
  int world_rank(int rank) const;  // of a rank of the group
  uint32_t epoch() const;          // of the next operation

  // All-gathers a small record: all[r * num_bytes ...] is rank r's. Every rank passes the same num_bytes
  // <= record_bytes. Also the point where op, layer, epoch, geometry and num_bytes of all ranks are compared,
  // as every collective below does too: kInternal names both ranks and both values, kDataLoss a record whose
  // checksum is wrong. `mine` may be its place in `all`.
  Status exchange(const OpName& op, const void* mine, int64_t num_bytes, void* all);

  // Rows of any size: rank r contributes counts[r] bytes; `out` has all of them, rank after rank. The counts
  // are known to all ranks and the same on all. `mine` may be its place in `out`.
  Status all_gather(const OpName& op, const void* mine, std::span<const int64_t> counts, void* out);
  // x[i] = sum over ranks in rank order, f32. In place; the same bits on every rank.
  Status all_reduce(const OpName& op, float* x, int64_t num_elems);
  // out = this rank's part of the sum: part r has counts[r] elements of x, rank after rank. `out` may be this
  // rank's part of x.
  Status reduce_scatter(const OpName& op, const float* x, std::span<const int64_t> counts, float* out);
  // num_bytes of rank `root` to all.
  Status broadcast(const OpName& op, int root, void* data, int64_t num_bytes);
  Status barrier(const OpName& op);

  // For transports that move rows themselves, between an exchange() and the next operation: puts to `rank` of
  // the group at a heap offset; data_ready(rank) announces all of them so far and ends a round;
  // wait_data(rank) returns when rank's next round is here. An operation may have many rounds, each counted
  // by itself; every data_ready() has its wait_data() in the same operation (the next one compares them).
  // When a region may be written again: see communicator.cc.
  Status put(int rank, int64_t heap_offset, const void* src, int64_t num_bytes);
  Status data_ready(const OpName& op, int rank);
  Status wait_data(const OpName& op, int rank);

  // The deadline of the waits from now on, such as kNoDeadline while an idle rank waits for work.
  void set_timeout(std::chrono::nanoseconds timeout);
  WaitStats wait_stats(int rank) const;

  struct State;  // private to comm

 private:
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
