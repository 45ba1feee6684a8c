// Transport: one rank's a2a. Moves a layer's token rows to where their experts are, and the results back.
// One object per model and rank; a layer's exchange is begin, then (next, run, combine) for each round, then
// finish. All ranks call them in the same order. A failed call fails the job.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "formats/tensor_scale.h"
#include "moe/expert_batch.h"
#include "moe/payload.h"
#include "moe/plan.h"
#include "moe/rank_layout.h"

namespace fp4moe {

struct TransportOptions {
  MoeProblem problem;  // global sizes; its layout says which rank this is
  Payload payload = Payload::kAct;
  CombinePayload combine_payload = CombinePayload::kAct;
  EncodeScale nvfp4_scale;     // kNvfp4: the layer's a1 comes with begin(); this is unused then
  bool deterministic = false;  // per-expert rows travel back and are summed in top-k order
  bool checksum = false;       // verify every row that arrives
  int64_t memory_budget = 0;   // bytes of the heap region
  int64_t region_offset = 0;   // in the symmetric heap
  int64_t max_group_rows = 0;  // most rows of a group's batch
};

struct TransportInput {
  int layer = 0;
  int64_t group_rows = 0;          // T of this rank's group
  ActRows x;                       // the own rows: [own_rows().count, H]
  const int32_t* ids = nullptr;    // [own rows, K] global; -1 and ids that are not an expert's are dropped
  const float* weights = nullptr;  // [own rows, K]
  bool nvfp4_per_token = false;    // kNvfp4 payload: each row's own scale instead of nvfp4_scale
  EncodeScale nvfp4_scale;         // kNvfp4 payload: the layer's scalar a1
  // For batches that are never whole in memory, in transports that exchange rows. Instead of x.data: writes
  // own row `row`, of the activation type, to x (called from pool threads). Instead of finish()'s out: takes
  // the row's sum once it is complete.
  std::function<void(int64_t row, void* x)> make_row;
  std::function<void(int64_t row, const float* sum)> take_row;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Rows of the group's T that this rank routes and dispatches. Without an exchange (a2a none, one group):
  // all T, on every rank.
  virtual Shard own_rows(int64_t group_rows) const = 0;
  // Most rows of a batch that next() makes, and what begin(), and next() and combine() of one round, take
  // from their arena at most, together.
  virtual int64_t max_batch_rows() const = 0;
  virtual int64_t scratch_bytes() const = 0;

  // Counts are exchanged and the first round's rows go out, but their arrival is not waited for, so that work
  // that needs no rows (the shared expert) can follow before next(). The input's memory lives until finish().
  virtual Status begin(const TransportInput& input, Arena& scratch, ThreadPool& pool) = 0;
  // The next round's rows, grouped by local expert; false when there is none left. A rank without rows of its
  // own still takes part. The batch's memory is the arena's and the heap's, valid until combine().
  virtual Result<bool> next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) = 0;
  // Sends the round's y back.
  virtual Status combine(const ExpertBatch& batch, Arena& scratch, ThreadPool& pool) = 0;
  // out [T of the group, H] f32: on entry this rank's own rows hold what is to be added (the shared expert's
  // output, or zeros; a2a none: this rank's partial of it), the others anything. On return all T rows hold
  // the layer's complete output, the same on all ranks of the group.
  virtual Status finish(float* out, ThreadPool& pool) = 0;
};

// Where a transport lives: the rank's communicators (null with one rank) and its part of the heap.
struct TransportSite {
  Communicator* world = nullptr;
  Communicator* attention = nullptr;
  int64_t region_offset = 0;
  int64_t max_group_rows = 0;  // most rows of a group's batch
};

// The plan's transport for the rank that plan.problem().layout names.
Result<std::unique_ptr<Transport>> make_transport(const MoePlan& plan, const TransportSite& site);
// Bytes of the symmetric heap that it uses, the same on every rank.
int64_t transport_heap_bytes(const MoePlan& plan, int64_t max_group_rows);

}  // namespace fp4moe
