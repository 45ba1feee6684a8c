// RankGroup: all ranks of a model behind one call. Each rank has a thread, its own pool, model shard and KV
// pages; the caller of forward() is rank 0's thread. Under mpi the other processes follow process 0.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "comm/job.h"
#include "engine/executor.h"
#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "io/checkpoint.h"
#include "model/model.h"
#include "model/plan_model.h"

namespace fp4moe {

struct RankGroupOptions {
  int64_t max_batch_tokens = 0;  // most rows of one group's batch in one step
  int64_t max_logit_rows = 0;    // most rows of logits in one step, all groups together
  int64_t num_kv_pages = 0;      // of each data-parallel group
  int64_t context_length = 0;    // of one request: what a GPU's page tables hold; 0: all pages
  bool wants_logits = false;     // GPU: logits() are wanted on the host, where they are not sampled
};

class RankGroup : public Executor {
 public:
  // Opens the job (fabric of the plan), then every local rank loads its shard. All processes call it with the
  // same arguments; that is checked. kDoesNotFit: no memory for weights, KV pages, heaps or logits.
  static Result<std::unique_ptr<RankGroup>> make(const Checkpoint& checkpoint, const ModelConfig& config,
                                                 const ModelPlan& plan, const EngineConfig& flags,
                                                 const RankGroupOptions& options);

  // forward() is for process 0. With several ranks an error ends the job: it names the rank and the
  // operation, and every later call returns it. With one rank there is no job, and an error is the step's
  // alone.

  // Other processes: takes part in the steps of process 0 until it ends the job; OK at an orderly end.
  virtual Status follow() = 0;

  // After a failure: ends all processes of the job now, with one line in the log, without waiting for any.
  virtual void abort() = 0;

  virtual const Job* job() const = 0;        // null: one rank alone
  virtual int64_t weight_bytes() const = 0;  // of all ranks of this process
  virtual int64_t kv_bytes() const = 0;
  virtual int64_t comm_bytes() const = 0;  // heaps of this process's ranks
  // Of the same ranks; from any thread.
  virtual ExpertLoad expert_load() const = 0;
};

}  // namespace fp4moe
