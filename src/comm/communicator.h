// Communicator: a group of consecutive ranks that run the same operations in the same order. Every message
// carries the operation's name and epoch, so that a disagreement between ranks is detected at the first
// message.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "comm/endpoint.h"

namespace fp4moe {

// Identifies an operation, for comparison between ranks and for error messages.
struct OpName {
  const char* op = "";    // "dispatch", "all_reduce", ...
  int layer = -1;         // -1: does not belong to a layer
  uint32_t geometry = 0;  // geometry_hash() of the sizes, dtypes and layouts that must be equal
};

// Returns the FNV-1a hash of the numbers.
uint32_t geometry_hash(std::span<const int64_t> numbers);

// No deadline: only a signal or the job's failure ends the wait.
constexpr std::chrono::nanoseconds kNoDeadline = std::chrono::nanoseconds::max();

struct CommOptions {
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);
  uint32_t first_epoch = 1;  // JobOptions::first_signal + 1; tests start near 2^32 to cover wrap-around
  bool checksum = false;     // verify the data of collectives; exchange() always verifies
};

// How long this rank has waited for a peer.
struct WaitStats {
  int64_t waits = 0;  // number of waits, including those that returned at once
  std::chrono::nanoseconds total{0}, longest{0};
};

// A communicator's memory in the symmetric heap, with the same values on every rank.
struct CommRegion {
  int64_t offset = 0;         // bytes, in the heap; 64-byte aligned
  int64_t record_bytes = 0;   // largest record of exchange(), per rank
  int64_t staging_bytes = 0;  // for the collectives; larger operands are transferred in pieces
  int first_slot = 0;         // the first of kCommSlots signal slots
};
constexpr int kCommSlots = 4;

class Communicator {
 public:
  // Returns the heap bytes of a region with these sizes.
  static int64_t heap_bytes(int num_ranks, int64_t record_bytes, int64_t staging_bytes);

  // The group has the ranks [first_rank, first_rank + num_ranks) of the endpoint's job, including this one.
  // The endpoint must outlive the communicator.
  Communicator(Endpoint& endpoint, int first_rank, int num_ranks, const CommRegion& region,
               const CommOptions& options);
  ~Communicator();

  int rank() const;  // within the group
  int size() const;
  Endpoint& endpoint() const;
  int world_rank(int rank) const;  // number in the job of the group's rank `rank`
  uint32_t epoch() const;          // of the next operation

  // All-gathers a small record: rank r's record starts at byte r * num_bytes of `all`. Every rank passes the
  // same num_bytes <= record_bytes. `mine` may point to this rank's record in `all`. Like every collective
  // below, it compares the op, layer, epoch, geometry and num_bytes of all ranks. kInternal: two ranks
  // disagree; the message names both ranks and both values. kDataLoss: a record's checksum is wrong.
  Status exchange(const OpName& op, const void* mine, int64_t num_bytes, void* all);

  // Rank r contributes counts[r] bytes (any size); `out` receives all contributions in rank order. All ranks
  // pass the same counts. `mine` may point to this rank's contribution in `out`.
  Status all_gather(const OpName& op, const void* mine, std::span<const int64_t> counts, void* out);
  // Rank r sends counts[r * size() + q] bytes to rank q. `mine` holds this rank's bytes for ranks 0, 1, ...
  // one after the other, and `out`, which must not overlap it, receives those from ranks 0, 1, .... All ranks
  // pass the same counts.
  Status all_to_all(const OpName& op, const void* mine, std::span<const int64_t> counts, void* out);
  // x[i] = sum over ranks in rank order, f32, in place; bit-identical on every rank.
  Status all_reduce(const OpName& op, float* x, int64_t num_elems);
  // out = this rank's part of the sum of x; part r has counts[r] elements, and the parts are in rank order.
  // `out` may point to this rank's part of x.
  Status reduce_scatter(const OpName& op, const float* x, std::span<const int64_t> counts, float* out);
  // Copies num_bytes at `data` from rank `root` to all ranks.
  Status broadcast(const OpName& op, int root, void* data, int64_t num_bytes);
  Status barrier(const OpName& op);

  // For transports that move rows themselves, between an exchange() and the next operation. put() writes to
  // the heap of rank `rank` of the group; data_ready(rank) announces all puts so far and ends a round;
  // wait_data(rank) returns when rank's next round has arrived. An operation may have any number of rounds
  // per pair of ranks; every data_ready() needs the peer's wait_data() in the same operation, which the next
  // operation checks. communicator.cc explains when a region may be reused.
  Status put(int rank, int64_t heap_offset, const void* src, int64_t num_bytes);
  Status data_ready(const OpName& op, int rank);
  Status wait_data(const OpName& op, int rank);

  // Sets the timeout of later waits. An idle rank that waits for work uses kNoDeadline.
  void set_timeout(std::chrono::nanoseconds timeout);
  WaitStats wait_stats(int rank) const;

  struct State;  // private to comm

 private:
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
