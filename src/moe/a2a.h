// The transports' rows in the table: makers and sizes. What each protocol does is said in its source.
//
// attention: of this rank's group; null where the group is one rank, or all of them.
// heap_bytes: of the symmetric heap, 0 where make() refuses. record_bytes: the largest record that the
// transport exchanges, which the world communicator's region must have room for.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/transport.h"

namespace fp4moe {

// deepep: low latency; masked batches, weights at the source. ep = tp.
Result<std::unique_ptr<Transport>> make_deepep(const TransportOptions& options, Communicator* world,
                                               Communicator* attention);
int64_t deepep_heap_bytes(const TransportOptions& options);

// flashinfer: one row per destination rank; packed batches, sums of each rank. ep = tp.
Result<std::unique_ptr<Transport>> make_flashinfer(const TransportOptions& options, Communicator* world,
                                                   Communicator* attention);
int64_t flashinfer_heap_bytes(const TransportOptions& options);

// none: no exchange within one group; rows are exchanged between several. ep = 1 or tp.
Result<std::unique_ptr<Transport>> make_none(const TransportOptions& options, Communicator* world,
                                             Communicator* attention);
Result<std::unique_ptr<Transport>> make_none_between_groups(const TransportOptions& options,
                                                            Communicator* world, Communicator* attention);
int64_t none_heap_bytes(const TransportOptions& options);

// What an exchange takes on each rank.
struct A2aBytes {
  int64_t heap = 0;  // the transport's region of the symmetric heap
  int64_t record =
      0;  // of Communicator::exchange(); its memory (Communicator::heap_bytes) is in the budget too
  int64_t scratch = 0;  // from the arena
  int64_t sums = 0;     // of the scratch: not taken where the input takes rows
  int64_t rows = 0;     // largest batch
};
// For a2a `name` (deepep, flashinfer, none). kUnsupported or kDoesNotFit where make would refuse.
Result<A2aBytes> a2a_bytes(const char* name, const TransportOptions& options);
// Of the plan's transport (transport.cc).
Result<A2aBytes> a2a_bytes(const MoePlan& plan, int64_t max_group_rows);

}  // namespace fp4moe
