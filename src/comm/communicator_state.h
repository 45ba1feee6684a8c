// Communicator's state: heap layout, counters and the lockstep step. Private to comm.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace fp4moe {

enum class OpKind : uint32_t {
  kExchange,
  kAllGather,
  kAllReduce,
  kReduceScatter,
  kBroadcast,
  kBarrier,
  kAllToAll
};

// One operation, as described in the headers of its steps.
struct Operation {
  OpName name;
  OpKind kind = OpKind::kExchange;
  uint32_t epoch = 0;
  uint32_t geometry = 0;      // hash of name.geometry and the kind's own parameters: counts, root
  int64_t operand_bytes = 0;  // the whole operand, over all steps
};

// Precedes every part in the heap. Fixed layout, little-endian.
struct StepHeader {
  uint32_t step = 0;
  uint32_t epoch = 0;
  uint32_t kind = 0;
  int32_t layer = 0;
  uint32_t op_hash = 0;  // hash of the whole name
  uint32_t geometry = 0;
  uint32_t rounds_sent = 0;    // data rounds from the writer to the reader, since the start
  uint32_t rounds_waited = 0;  // data rounds from the reader for which the writer has waited
  int64_t operand_bytes = 0;
  int64_t part_bytes = 0;  // the part follows at kHeaderBytes
  uint64_t checksum = 0;   // of the header with checksum = 0, and of the part if `verified`
  char op[24] = {};        // truncated name, for messages
  uint8_t verified = 0;    // the checksum covers the part
  uint8_t zero[7] = {};
};
static_assert(sizeof(StepHeader) == 88);
constexpr int64_t kHeaderBytes = 128;

// Buffers for one kind of part: [2 parities][num_ranks sources][header, part].
struct StepArea {
  int64_t offset = 0;  // in the heap
  int64_t part_bytes = 0;
  bool verified = false;
  int64_t stride() const { return kHeaderBytes + (part_bytes + 63) / 64 * 64; }
  int64_t num_bytes(int num_ranks) const { return 2 * num_ranks * stride(); }
};
inline StepArea record_area(const CommRegion& region) { return {region.offset, region.record_bytes, true}; }
// Divides staging_bytes among both parities and all sources; a part has at least one cache line.
inline StepArea staging_area(int num_ranks, const CommRegion& region) {
  const int64_t part = region.staging_bytes / (2 * num_ranks) / 64 * 64;
  return {region.offset + record_area(region).num_bytes(num_ranks), part < 64 ? 64 : part, false};
}

struct ConstBytes {
  const void* data = nullptr;
  int64_t num_bytes = 0;
};

// The data that a rank sends to each peer in one step, and the number of bytes that it expects from each.
class StepParts {
 public:
  virtual ~StepParts() = default;
  virtual ConstBytes to(int rank) const = 0;
  virtual int64_t bytes_from(int rank) const = 0;
};

struct Communicator::State {
  using Clock = std::chrono::steady_clock;
  struct Peer {
    uint32_t rounds_sent = 0, rounds_waited = 0;
    WaitStats stats;
    Clock::time_point next_warning{};
  };

  State(Endpoint& e, int first, int n, const CommRegion& region, const CommOptions& options);
  Peer& peer(int rank);
  int step_slot() const { return first_slot; }
  int data_slot() const { return first_slot + 1; }

  // Starts an operation in a new epoch.
  Operation begin(const OpName& name, OpKind kind, uint32_t geometry, int64_t operand_bytes);
  // Runs one lockstep step. Its parts (part_from()) are valid until the next step begins.
  Status step(const Operation& op, const StepArea& area, const StepParts& parts);
  // Returns another rank's part in the step that has just ended.
  const uint8_t* part_from(const StepArea& area, int rank) const;
  // Heap offset of the source's part in step `step`, the same at every destination.
  int64_t place(const StepArea& area, uint32_t step, int source) const;
  // Waits for the signal; fails the job after the timeout.
  Status wait_for(const Operation& op, int from, int slot, uint32_t value, uint32_t* seen);

  Status send_part(const Operation& op, const StepArea& area, int to, const ConstBytes& part);
  Status check_part(const Operation& op, const StepArea& area, int from, int64_t part_bytes);
  std::string disagreement(int from, const StepHeader& mine, const StepHeader& theirs) const;
  Status end_job(int from, StatusCode code, const std::string& text);
  std::string waiting_text(const Operation& op, int from, std::chrono::nanoseconds waited) const;
  void warn_slow(const Operation& op, int from, std::chrono::nanoseconds waited);
  StepHeader header(const Operation& op, const StepArea& area, int peer_rank, const ConstBytes& part) const;

  Endpoint& endpoint;
  const int first_rank, size, me, first_slot;
  const uint32_t first_epoch;
  std::chrono::nanoseconds timeout;
  uint32_t epoch, next_step;
  StepArea records, staging;
  std::vector<Peer> peers;
  // Per-rank values of the current operation. They are members so that operations do not allocate.
  std::vector<int64_t> starts, offsets, piece, expected;
  std::vector<const float*> sources;
};

}  // namespace fp4moe
