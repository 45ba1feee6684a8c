// RankGroup: all ranks of a model behind one interface. Each rank has its own thread, pool, model shard and
// KV pages; rank 0's is the thread that calls execute_step(). With MPI, the other processes follow process 0.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "comm/job.h"
#include "engine/ranks/executor.h"
#include "fp4moe/config.h"
#include "fp4moe/engine.h"
#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/checkpoint_form.h"
#include "model/model.h"
#include "model/plan_model.h"

namespace fp4moe {

struct RankGroupOptions {
  int64_t max_batch_tokens = 0;  // maximum number of rows in one group's batch of one step
  int64_t max_logit_rows = 0;    // maximum number of logit rows in one step, over all groups
  int64_t num_kv_pages = 0;      // per data-parallel group
  int64_t num_window_pages =
      0;                  // the same, for window layers (model/kv_window.h); 0: all layers use num_kv_pages
  int64_t num_slots = 0;  // of states, per data-parallel group, with slot 0; 0: the model has no states
  int64_t context_length = 0;   // tokens per request; sizes a GPU's page tables; 0: the tokens of all pages
  bool accepts_drafts = false;  // GPU, without states: Executor::accepts_drafts()
  bool wants_logits = false;    // GPU: copy logits to the host even though sampling runs on the GPU
};

// The part of a draft model in bytes of weights and KV pages.
struct DraftBytes {
  int64_t weights = 0, kv = 0;
};

// After a failure, process 0 first ends its clients' requests and then the job. If it has not ended the job
// after this time, the other processes do.
constexpr std::chrono::seconds kAbortGrace{1};

class RankGroup : public Executor {
 public:
  // Opens the job (the plan's fabric), then loads every local rank's shard. All processes must call make()
  // with the same arguments; it checks that they do. `draft`: the checkpoint of plan.draft, if that has a
  // separate one. kDoesNotFit: not enough memory for weights, KV pages, heaps or logits.
  static Result<std::unique_ptr<RankGroup>> make(const Checkpoint& checkpoint, const ModelConfig& config,
                                                 const ModelPlan& plan, const EngineConfig& flags,
                                                 const RankGroupOptions& options,
                                                 const Checkpoint* draft = nullptr);

  // execute_step() may be called only in process 0. With several ranks, an error ends the job: the error
  // names the rank and the operation, and every later call returns it. With one rank there is no job, and an
  // error affects only its step (but a GPU's device error is permanent).

  // Process 0, between steps: replaces the weights of all ranks by those of the checkpoint `folder`, on GPUs
  // at the same addresses. An error while failure() is OK: the checkpoint was refused, and the weights are as
  // before: the errors of check_reload(), or a tensor has a wrong value. After any other error, failure() is
  // permanent. Placed experts stay where they are, and so do the weights of a draft model with a separate
  // checkpoint.
  Status reload(const std::string& folder);
  // Compares the checkpoint's form (io/checkpoint/checkpoint_form.h) with the loaded one's; thread-safe.
  Status check_reload(const std::string& folder) const;
  Result<ExpertMoves> rebalance_experts() final {
    return places_experts_ ? move_experts() : Executor::rebalance_experts();
  }

  // In other processes: runs the steps of process 0 until process 0 ends the job. OK after an orderly end.
  virtual Status follow() = 0;

  // After a failure: ends all processes of the job immediately, with one log line, without waiting for them.
  virtual void abort() = 0;

  virtual const Job* job() const = 0;        // null if there is only one rank
  virtual int64_t weight_bytes() const = 0;  // all ranks of this process, in bytes
  virtual int64_t kv_bytes() const = 0;
  virtual DraftBytes draft_bytes() const { return {}; }  // the draft models' part of the same
  virtual int64_t comm_bytes() const = 0;                // heaps of the same ranks
  // Returns the counters of the same ranks; thread-safe.
  virtual ExpertLoad expert_load() const = 0;

 protected:
  // reload() for a folder that has passed check_reload().
  virtual Status reload_ranks(const std::string& folder) = 0;
  // rebalance_experts() with a plan that places experts.
  virtual Result<ExpertMoves> move_experts() = 0;

 private:
  std::shared_ptr<const CheckpointForm> form_;
  bool places_experts_ = false;
  std::string no_reload_;  // why reload() is refused; empty: it is not
};

}  // namespace fp4moe
