// Factories and sizes of the transports in the table. Each protocol is described in its source file.
//
// attention: communicator of this rank's group; null if the group is one rank, null or `world` if it is all
// ranks.
// *_heap_bytes: bytes of the symmetric heap; 0 if make_* would fail.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/transport/transport.h"

namespace fp4moe {

// deepep: low latency; masked batches, weighted at the source. Requires ep = tp.
Result<std::unique_ptr<Transport>> make_deepep(const TransportOptions& options, Communicator* world,
                                               Communicator* attention);
int64_t deepep_heap_bytes(const TransportOptions& options);

// flashinfer: one row per destination rank; packed batches, one partial sum per rank. Requires ep = tp.
Result<std::unique_ptr<Transport>> make_flashinfer(const TransportOptions& options, Communicator* world,
                                                   Communicator* attention);
int64_t flashinfer_heap_bytes(const TransportOptions& options);

// none: one group exchanges no rows; several groups do. Requires ep = 1 or ep = tp.
Result<std::unique_ptr<Transport>> make_none(const TransportOptions& options, Communicator* world,
                                             Communicator* attention);
Result<std::unique_ptr<Transport>> make_none_between_groups(const TransportOptions& options,
                                                            Communicator* world, Communicator* attention);
int64_t none_heap_bytes(const TransportOptions& options);

// Memory of an exchange on each rank, in bytes.
struct A2aBytes {
  int64_t heap = 0;  // the transport's region of the symmetric heap
  // Largest record of Communicator::exchange(); its Communicator::heap_bytes() count towards the budget.
  int64_t record = 0;
  int64_t scratch = 0;  // from the arena
  int64_t sums = 0;     // part of scratch that is not used if TransportInput::take_row is set
  int64_t rows = 0;     // rows (not bytes) of the largest batch
};
// Returns the sizes for a2a `name` (deepep, flashinfer, none); kUnsupported or kDoesNotFit if make_* would
// fail.
Result<A2aBytes> a2a_bytes(const char* name, const TransportOptions& options);
// Returns the sizes for the plan's transport (transport.cc).
Result<A2aBytes> a2a_bytes(const MoePlan& plan, int64_t max_group_rows);

}  // namespace fp4moe
