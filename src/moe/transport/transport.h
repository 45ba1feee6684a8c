// Transport: one rank's a2a. Moves a layer's token rows to the ranks of their experts, and the results back.
// One object per model and rank. A layer's exchange is begin(), then next(), the runner and combine() for
// each round, then finish(). All ranks make the same calls in the same order. A failed call fails the job.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "formats/tensor_scale.h"
#include "moe/expert_batch.h"
#include "moe/plan/payload.h"
#include "moe/plan/plan.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

struct TransportOptions {
  MoeProblem problem;  // global sizes; its layout names this rank
  Payload payload = Payload::kAct;
  CombinePayload combine_payload = CombinePayload::kAct;
  bool deterministic = false;  // per-expert rows are returned, and the source sums them in top-k order
  bool checksum = false;       // verify every row that arrives
  int64_t memory_budget = 0;   // bytes of heap; a2a none with one group: bytes of a round's batch
  int64_t region_offset = 0;   // bytes, in the symmetric heap
  int64_t max_group_rows = 0;  // maximum number of rows in a group's batch
};

struct TransportInput {
  int layer = 0;           // for messages and checks
  int64_t group_rows = 0;  // T of this rank's group
  ActRows x;               // this rank's rows: [own_rows().count, H]
  // [own rows, K], of physical experts; ids that are not in [0, num_physical), such as -1, are dropped.
  const int32_t* ids = nullptr;
  const float* weights = nullptr;  // [own rows, K]
  bool nvfp4_per_token = false;    // kNvfp4 payload: one tensor scale per row instead of nvfp4_scale
  EncodeScale nvfp4_scale;         // kNvfp4 payload: the layer's scalar a1
  // Optional, for transports that exchange rows: they allow batches that are never in memory as a whole.
  // make_row replaces x.data: it writes own row `row`, in the activation type, to x, and is called from pool
  // threads. take_row replaces finish()'s out: it receives the row's complete sum.
  std::function<void(int64_t row, void* x)> make_row;
  std::function<void(int64_t row, const float* sum)> take_row;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // The rows of the group's T that this rank routes and dispatches. Without an exchange (a2a none, one
  // group): all T, on every rank.
  virtual Shard own_rows(int64_t group_rows) const = 0;
  // Maximum number of rows in a batch from next().
  virtual int64_t max_batch_rows() const = 0;
  // Maximum number of bytes that begin(), next() and combine() together take from the arena for one round.
  virtual int64_t scratch_bytes() const = 0;

  // Exchanges counts and sends the first round's rows without waiting for their arrival, so that independent
  // work (the shared expert) can overlap before next(). The input's memory must live until finish().
  virtual Status begin(const TransportInput& input, Arena& scratch, ThreadPool& pool) = 0;
  // The next round's rows, grouped by local expert; false after the last round. A rank without rows takes
  // part too. The batch's memory is in the arena and the heap, valid until combine().
  virtual Result<bool> next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) = 0;
  // Sends the round's y back.
  virtual Status combine(const ExpertBatch& batch, Arena& scratch, ThreadPool& pool) = 0;
  // out [T of the group, H] f32. On entry this rank's own rows hold the shared expert's output or zeros (a2a
  // none: this rank's partial sum of it); other rows are undefined. On return all T rows hold the layer's
  // complete output, the same on all ranks of the group.
  virtual Status finish(float* out, ThreadPool& pool) = 0;
};

// The rank's communicators (null with one rank) and the transport's place in the heap.
struct TransportSite {
  Communicator* world = nullptr;
  Communicator* attention = nullptr;
  int64_t region_offset = 0;   // bytes, in the symmetric heap
  int64_t max_group_rows = 0;  // maximum number of rows in a group's batch
};

// Makes the plan's transport for the rank in plan.problem().layout.
Result<std::unique_ptr<Transport>> make_transport(const MoePlan& plan, const TransportSite& site);
// Bytes of the symmetric heap that the transport uses, the same on every rank.
int64_t transport_heap_bytes(const MoePlan& plan, int64_t max_group_rows);

}  // namespace fp4moe
