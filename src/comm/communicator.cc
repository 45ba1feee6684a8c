// Epochs and steps. An operation is one epoch and consists of lockstep steps: in step s a rank puts a header
// and its part to every peer, signals s (slot first_slot) to every peer, then waits for s from every peer,
// compares the headers and reads the parts. exchange() is one step, a collective one or more.
//
// Reuse of part buffers. Each source has two buffers at each destination, selected by the parity of s. A rank
// that has finished step s has seen signal s from every peer, and every peer had finished reading the parts
// of step s - 1 before it signalled s. So when the rank overwrites the buffers of step s - 1 in step s + 1,
// no peer reads them any more. A peer can be at most one step ahead: to signal s + 2 it needs our s + 1. So a
// cell above s + 1 is a protocol error, and a header read in step s belongs to step s.
//
// Data rounds. Between its exchange() and the next operation a transport puts rows itself. Rounds are counted
// per ordered pair and signalled in slot first_slot + 1: the n-th data_ready(b) of rank a matches the n-th
// wait_data(a) of rank b, so two rounds are never confused. Every step's header carries both counts, which
// must agree: a round that one side skipped or repeated ends the job at the next operation. A peer's region
// may be overwritten after a signal that the peer sent once it had read the region: data_ready() of a later
// round, or its next step. If dispatch and combine alternate over one pair of regions, a peer's combine round
// n frees the region of dispatch round n, and its dispatch round n + 1 frees that of combine round n.
//
// Deadlines. Every wait ends after options.timeout with an error that names both ranks, the operation, its
// layer and epoch, and the signal expected and seen. It becomes the job's failure, which all ranks return. If
// a process ends (kUnavailable), the error also names the operation that waited for it.
#include "comm/communicator.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/communicator_state.h"

namespace fp4moe {

using std::chrono::nanoseconds;

uint32_t geometry_hash(std::span<const int64_t> numbers) {
  uint32_t hash = 2166136261u;
  for (const int64_t number : numbers)
    for (int byte = 0; byte < 8; ++byte)
      hash = (hash ^ static_cast<uint8_t>(static_cast<uint64_t>(number) >> (8 * byte))) * 16777619u;
  return hash;
}

int64_t Communicator::heap_bytes(int num_ranks, int64_t record_bytes, int64_t staging_bytes) {
  FP4MOE_CHECK(num_ranks >= 1 && record_bytes >= 0 && staging_bytes >= 0,
               "communicator of " + std::to_string(num_ranks) + " ranks, records of " +
                   std::to_string(record_bytes) + " bytes, staging of " + std::to_string(staging_bytes));
  return record_area({.record_bytes = record_bytes}).num_bytes(num_ranks) +
         staging_area(num_ranks, {.staging_bytes = staging_bytes}).num_bytes(num_ranks);
}

Communicator::Communicator(Endpoint& endpoint, int first_rank, int num_ranks, const CommRegion& region,
                           const CommOptions& options)
    : state_(std::make_unique<State>(endpoint, first_rank, num_ranks, region, options)) {
  FP4MOE_CHECK(first_rank >= 0 && num_ranks >= 1 && num_ranks <= endpoint.size() - first_rank,
               "first_rank=" + std::to_string(first_rank) + ", num_ranks=" + std::to_string(num_ranks) +
                   " in a job of size " + std::to_string(endpoint.size()));
  FP4MOE_CHECK(state_->me >= 0 && state_->me < num_ranks,
               "rank " + std::to_string(endpoint.rank()) + " is not in the group");
  FP4MOE_CHECK(region.first_slot >= 0 && region.first_slot + kCommSlots <= kSignalSlots,
               "first_slot=" + std::to_string(region.first_slot));
  const int64_t bytes = heap_bytes(num_ranks, region.record_bytes, region.staging_bytes);
  FP4MOE_CHECK(region.offset >= 0 && region.offset % 64 == 0 && region.offset <= endpoint.heap_bytes() &&
                   bytes <= endpoint.heap_bytes() - region.offset,
               "region of " + std::to_string(bytes) + " bytes at " + std::to_string(region.offset) +
                   " of a heap of " + std::to_string(endpoint.heap_bytes()));
}
Communicator::~Communicator() = default;

int Communicator::rank() const { return state_->me; }
int Communicator::size() const { return state_->size; }
Endpoint& Communicator::endpoint() const { return state_->endpoint; }
int Communicator::world_rank(int rank) const { return state_->first_rank + rank; }
uint32_t Communicator::epoch() const { return state_->epoch; }
void Communicator::set_timeout(nanoseconds timeout) { state_->timeout = timeout; }
WaitStats Communicator::wait_stats(int rank) const { return state_->peer(rank).stats; }

Status Communicator::put(int rank, int64_t heap_offset, const void* src, int64_t num_bytes) {
  return state_->endpoint.put(world_rank(rank), heap_offset, src, num_bytes);
}

Status Communicator::data_ready(const OpName&, int rank) {
  State::Peer& peer = state_->peer(rank);
  ++peer.rounds_sent;
  return state_->endpoint.signal(world_rank(rank), state_->data_slot(),
                                 state_->first_epoch - 1 + peer.rounds_sent);
}

Status Communicator::wait_data(const OpName& op, int rank) {
  State::Peer& peer = state_->peer(rank);
  ++peer.rounds_waited;
  const Operation operation = {.name = op, .kind = OpKind::kExchange, .epoch = state_->epoch - 1};
  return state_->wait_for(operation, rank, state_->data_slot(), state_->first_epoch - 1 + peer.rounds_waited,
                          nullptr);
}

Status Communicator::State::wait_for(const Operation& op, int from, int slot, uint32_t value,
                                     uint32_t* seen_out) {
  constexpr nanoseconds kSlow = std::chrono::seconds(1);
  uint32_t seen = 0;
  const auto begin = Clock::now();
  Status status = endpoint.wait(first_rank + from, slot, value, std::min(timeout, kSlow), &seen);
  if (!status.ok() && endpoint.failure().ok() && timeout > kSlow) {
    if (timeout != kNoDeadline) warn_slow(op, from, Clock::now() - begin);
    const nanoseconds left = timeout == kNoDeadline ? timeout : timeout - (Clock::now() - begin);
    status = endpoint.wait(first_rank + from, slot, value, std::max(left, nanoseconds(0)), &seen);
  }
  const nanoseconds waited = Clock::now() - begin;
  WaitStats& stats = peer(from).stats;
  stats.waits += 1;
  stats.total += waited;
  stats.longest = std::max(stats.longest, waited);
  if (seen_out != nullptr) *seen_out = seen;
  if (status.ok()) return status;
  if (endpoint.failure().ok())
    endpoint.fail({StatusCode::kDeadline, waiting_text(op, from, waited) + ": expected signal " +
                                              std::to_string(value) + ", seen " + std::to_string(seen)});
  const Status failure = endpoint.failure();
  // If a process has ended, only this rank knows which operation waited for it.
  return failure.code() == StatusCode::kUnavailable ? failure.with_context(waiting_text(op, from, waited))
                                                    : failure;
}

}  // namespace fp4moe
