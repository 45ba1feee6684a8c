// The lockstep step: headers, their comparison, and errors. The protocol is described in communicator.cc.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "base/hash.h"
#include "base/log.h"
#include "comm/communicator_state.h"
#include "comm/rank_memory.h"

namespace fp4moe {
namespace {

using std::chrono::nanoseconds;

const char* kind_name(uint32_t kind) {
  constexpr const char* kNames[] = {"exchange",       "all_gather", "all_reduce",
                                    "reduce_scatter", "broadcast",  "barrier"};
  return kind < std::size(kNames) ? kNames[kind] : "unknown kind";
}

std::string seconds_text(nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(time).count());
  return text;
}

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%08llx", static_cast<unsigned long long>(value));
  return text;
}

std::string layer_text(int layer) { return layer < 0 ? "" : ", layer " + std::to_string(layer); }

// Returns, for example, "dispatch (all_gather), layer 3, geometry 0x01020304, 4096 bytes, epoch 217".
std::string describe(const StepHeader& h) {
  const std::string op(h.op, strnlen(h.op, sizeof h.op));
  return op + " (" + kind_name(h.kind) + ")" + layer_text(h.layer) + ", geometry " + hex(h.geometry) + ", " +
         std::to_string(h.operand_bytes) + " bytes, epoch " + std::to_string(h.epoch);
}

uint64_t checksum_of(StepHeader h, const void* part) {
  h.checksum = 0;
  const uint64_t seed = hash64(&h, sizeof h);
  return h.verified != 0 ? hash64(part, h.part_bytes, seed) : seed;
}

}  // namespace

Communicator::State::State(Endpoint& e, int first, int n, const CommRegion& region,
                           const CommOptions& options)
    : endpoint(e),
      first_rank(first),
      size(n),
      me(e.rank() - first),
      first_slot(region.first_slot),
      first_epoch(options.first_epoch),
      timeout(options.timeout),
      epoch(options.first_epoch),
      next_step(options.first_epoch),
      records(record_area(region)),
      staging(staging_area(n, region)),
      peers(static_cast<size_t>(std::max(n, 0))),
      starts(peers.size()),
      offsets(peers.size()),
      piece(peers.size()),
      expected(peers.size()),
      sources(peers.size()) {
  staging.verified = options.checksum;
}

Communicator::State::Peer& Communicator::State::peer(int rank) {
  FP4MOE_CHECK(rank >= 0 && rank < size, "rank " + std::to_string(rank) + " of " + std::to_string(size));
  return peers[static_cast<size_t>(rank)];
}

Operation Communicator::State::begin(const OpName& name, OpKind kind, uint32_t geometry,
                                     int64_t operand_bytes) {
  const int64_t mixed[2] = {name.geometry, geometry};
  return {.name = name,
          .kind = kind,
          .epoch = epoch++,
          .geometry = geometry == 0 ? name.geometry : geometry_hash(mixed),
          .operand_bytes = operand_bytes};
}

int64_t Communicator::State::place(const StepArea& area, uint32_t step, int source) const {
  return area.offset + (static_cast<int64_t>(step & 1) * size + source) * area.stride();
}

const uint8_t* Communicator::State::part_from(const StepArea& area, int rank) const {
  return endpoint.heap() + place(area, next_step - 1, rank) + kHeaderBytes;
}

Status Communicator::State::step(const Operation& op, const StepArea& area, const StepParts& parts) {
  for (int i = 1; i < size; ++i) {
    const int to = (me + i) % size;
    FP4MOE_RETURN_IF_ERROR(send_part(op, area, to, parts.to(to)));
  }
  for (int i = 1; i < size; ++i) {
    const int from = (me + size - i) % size;
    uint32_t seen = 0;
    FP4MOE_RETURN_IF_ERROR(wait_for(op, from, step_slot(), next_step, &seen));
    if (seen != next_step && seen != next_step + 1)
      return end_job(from, StatusCode::kInternal,
                     "is " + std::to_string(static_cast<int32_t>(seen - next_step)) +
                         " steps ahead of rank " + std::to_string(endpoint.rank()) + " in " + op.name.op +
                         layer_text(op.name.layer) + ", epoch " + std::to_string(op.epoch) +
                         ": seen signal " + std::to_string(seen) + ", but at most " +
                         std::to_string(next_step + 1) + " is possible in lockstep");
    FP4MOE_RETURN_IF_ERROR(check_part(op, area, from, parts.bytes_from(from)));
  }
  ++next_step;
  return {};
}

StepHeader Communicator::State::header(const Operation& op, const StepArea& area, int peer_rank,
                                       const ConstBytes& part) const {
  const Peer& p = peers[static_cast<size_t>(peer_rank)];
  StepHeader h;
  h.step = next_step;
  h.epoch = op.epoch;
  h.kind = static_cast<uint32_t>(op.kind);
  h.layer = op.name.layer;
  h.op_hash = static_cast<uint32_t>(hash64(op.name.op, static_cast<int64_t>(std::strlen(op.name.op))));
  h.geometry = op.geometry;
  h.rounds_sent = p.rounds_sent;
  h.rounds_waited = p.rounds_waited;
  h.operand_bytes = op.operand_bytes;
  h.part_bytes = part.num_bytes;
  std::strncpy(h.op, op.name.op, sizeof h.op - 1);
  h.verified = area.verified ? 1 : 0;
  return h;
}

Status Communicator::State::send_part(const Operation& op, const StepArea& area, int to,
                                      const ConstBytes& part) {
  FP4MOE_CHECK(part.num_bytes >= 0 && part.num_bytes <= area.part_bytes,
               std::string(op.name.op) + ": a part of " + std::to_string(part.num_bytes) +
                   " bytes; the limit is " + std::to_string(area.part_bytes));
  StepHeader h = header(op, area, to, part);
  h.checksum = checksum_of(h, part.data);
  const int64_t offset = place(area, next_step, me);
  FP4MOE_RETURN_IF_ERROR(endpoint.put(first_rank + to, offset, &h, sizeof h));
  if (part.num_bytes > 0)
    FP4MOE_RETURN_IF_ERROR(endpoint.put(first_rank + to, offset + kHeaderBytes, part.data, part.num_bytes));
  return endpoint.signal(first_rank + to, step_slot(), next_step);
}

// The header is checked before any of its values is used.
Status Communicator::State::check_part(const Operation& op, const StepArea& area, int from,
                                       int64_t part_bytes) {
  const uint8_t* at = endpoint.heap() + place(area, next_step, from);
  StepHeader theirs;
  std::memcpy(&theirs, at, sizeof theirs);
  const StepHeader mine = header(op, area, from, {nullptr, part_bytes});
  const std::string text = disagreement(from, mine, theirs);
  const bool sized = theirs.part_bytes >= 0 && theirs.part_bytes <= area.part_bytes;
  const uint64_t sum = sized ? checksum_of(theirs, at + kHeaderBytes) : 0;
  if (!sized || sum != theirs.checksum)
    return end_job(from, StatusCode::kDataLoss,
                   "sent a corrupt record to rank " + std::to_string(endpoint.rank()) + " in " + op.name.op +
                       layer_text(op.name.layer) + ", epoch " + std::to_string(op.epoch) + ": checksum " +
                       hex(theirs.checksum) + " announced, " + hex(sum) + " computed");
  if (text.empty()) return {};
  return end_job(from, StatusCode::kInternal, text);
}

std::string Communicator::State::disagreement(int from, const StepHeader& mine,
                                              const StepHeader& theirs) const {
  const auto differ = [&](const std::string& what, const std::string& there, const std::string& here) {
    const std::string my_name = "rank " + std::to_string(endpoint.rank());
    const std::string their_name = "rank " + std::to_string(first_rank + from);
    return "and " + my_name + " disagree in epoch " + std::to_string(mine.epoch) + " on " + what + ": " +
           there + " on " + their_name + ", " + here + " on " + my_name + " (" + their_name + ": " +
           describe(theirs) + "; " + my_name + ": " + describe(mine) + ")";
  };
  const auto number = [](auto value) { return std::to_string(value); };
  if (theirs.op_hash != mine.op_hash)
    return differ("op", std::string(theirs.op, strnlen(theirs.op, sizeof theirs.op)), std::string(mine.op));
  if (theirs.kind != mine.kind) return differ("kind", kind_name(theirs.kind), kind_name(mine.kind));
  if (theirs.layer != mine.layer) return differ("layer", number(theirs.layer), number(mine.layer));
  if (theirs.operand_bytes != mine.operand_bytes)
    return differ("bytes", number(theirs.operand_bytes), number(mine.operand_bytes));
  if (theirs.geometry != mine.geometry) return differ("geometry", hex(theirs.geometry), hex(mine.geometry));
  if (theirs.part_bytes != mine.part_bytes)
    return differ("bytes of a part", number(theirs.part_bytes), number(mine.part_bytes));
  if (theirs.rounds_sent != mine.rounds_waited)
    return differ("data rounds announced", number(theirs.rounds_sent),
                  number(mine.rounds_waited) + " waited for");
  if (theirs.rounds_waited != mine.rounds_sent)
    return differ("data rounds waited for", number(theirs.rounds_waited),
                  number(mine.rounds_sent) + " announced");
  if (theirs.epoch != mine.epoch) return differ("epoch", number(theirs.epoch), number(mine.epoch));
  if (theirs.step != mine.step) return differ("step", number(theirs.step), number(mine.step));
  if (theirs.verified != mine.verified)
    return differ("checksum", number(int{theirs.verified}), number(int{mine.verified}));
  return "";
}

Status Communicator::State::end_job(int from, StatusCode code, const std::string& text) {
  endpoint.fail({code, "rank " + std::to_string(first_rank + from) + " " + text});
  return endpoint.failure();
}

std::string Communicator::State::waiting_text(const Operation& op, int from, nanoseconds waited) const {
  // The late rank may itself be waiting for another rank. The last rank in the chain blocks all of them.
  std::string chain;
  int last = first_rank + from;
  for (int links = 0; links < endpoint.size(); ++links) {
    const int next = endpoint.waits_for(last);
    if (next < 0 || next == endpoint.rank()) break;
    chain += ", which waits for rank " + std::to_string(next);
    last = next;
  }
  return "rank " + std::to_string(endpoint.rank()) + " waited " + seconds_text(waited) + " for rank " +
         std::to_string(first_rank + from) + (chain.empty() ? " in " : chain + ", in ") + op.name.op +
         layer_text(op.name.layer) + ", epoch " + std::to_string(op.epoch);
}

// Logs at most one line per slow peer in each period of kEvery.
void Communicator::State::warn_slow(const Operation& op, int from, nanoseconds waited) {
  constexpr auto kEvery = std::chrono::seconds(10);
  Peer& p = peer(from);
  const auto now = Clock::now();
  if (now < p.next_warning) return;
  p.next_warning = now + kEvery;
  log_warning("rank " + std::to_string(first_rank + from) + " is slow: " + waiting_text(op, from, waited) +
              " and is still waiting; the longest of " + std::to_string(p.stats.waits) +
              " earlier waits for it took " + seconds_text(p.stats.longest));
}

}  // namespace fp4moe
