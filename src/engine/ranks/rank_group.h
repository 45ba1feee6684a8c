// RankGroup: all ranks of a model behind one interface. Each rank has its own thread, pool, model shard and
// KV pages; the caller of execute_step() is rank 0's thread. With mpi the other processes follow process 0.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "comm/job.h"
#include "engine/ranks/executor.h"
#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "io/checkpoint/checkpoint.h"
#include "model/model.h"
#include "model/plan_model.h"

namespace fp4moe {

struct RankGroupOptions {
  int64_t max_batch_tokens = 0;  // maximum rows of one group's batch in one step
  int64_t max_logit_rows = 0;    // maximum logit rows of one step, over all groups
  int64_t num_kv_pages = 0;      // per data-parallel group
  int64_t context_length = 0;    // of one request, in tokens: the size of a GPU's page tables; 0: all pages
  bool wants_logits = false;     // GPU: copy logits to the host even though sampling runs on the GPU
};

class RankGroup : public Executor {
 public:
  // Opens the job (the plan's fabric), then loads every local rank's shard. All processes must call it with
  // the same arguments, which is checked. kDoesNotFit: no memory for weights, KV pages, heaps or logits.
  static Result<std::unique_ptr<RankGroup>> make(const Checkpoint& checkpoint, const ModelConfig& config,
                                                 const ModelPlan& plan, const EngineConfig& flags,
                                                 const RankGroupOptions& options);

  // execute_step() may only be called in process 0. With several ranks an error ends the job: it names the
  // rank and the operation, and every later call returns it. With one rank there is no job, and an error
  // concerns its step only (a GPU's device error is permanent).

  // Other processes: runs the steps of process 0 until it ends the job; OK after an orderly end.
  virtual Status follow() = 0;

  // After a failure: ends all processes of the job now, with one line in the log, without waiting for them.
  virtual void abort() = 0;

  virtual const Job* job() const = 0;        // null if there is only one rank
  virtual int64_t weight_bytes() const = 0;  // all ranks of this process, in bytes
  virtual int64_t kv_bytes() const = 0;
  virtual int64_t comm_bytes() const = 0;  // heaps of the same ranks
  // Counters of the same ranks; thread-safe.
  virtual ExpertLoad expert_load() const = 0;
};

}  // namespace fp4moe
