// StepRunner: the ranks of a job run steps together. Rank 0's thread is the caller's; the other ranks of this
// process have threads of their own, those of other processes follow process 0.
//
// A step, over the signal slots 12 to 15 (comm/endpoint.h), n counting from first_signal + 1:
//   0 -> r  kStep   n      the batches are there: in memory for ranks of process 0, else in r's heap
//   r -> 0  kDone   n + 1  r has run them (the first: r is ready)
//   g -> 0  kLogits i      piece i of the logits of g, the first rank of a group in another process, is in
//                          rank 0's heap; both halves of g's place take turns
//   0 -> g  kTaken  i      piece i was copied out
// Rank 0 ends a step when all are done, so what a step wrote may be written again by the next one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "comm/job.h"
#include "engine/step_batches.h"
#include "moe/rank_layout.h"

namespace fp4moe {

// Where a rank's heap holds what steps need.
struct StepRegion {
  int64_t step_offset = 0;    // 64-byte aligned; an encoded step
  int64_t logits_offset = 0;  // 64-byte aligned; for each group two pieces of logits
  int64_t piece_bytes = 0;    // of each

  static int64_t step_bytes(const StepLimits& limits);
  int64_t logits_bytes(const StepLimits& limits) const { return limits.num_groups * 2 * piece_bytes; }
};

// Runs one rank's model; logits is null on all but a group's first rank.
using RankForward = std::function<Status(int rank, const Batch& batch, float* logits)>;

struct StepRunnerOptions {
  RankLayout layout;  // tp ranks in dp groups
  StepLimits limits;
  StepRegion region;
  std::chrono::nanoseconds timeout{};  // that rank 0 waits for a rank after its own part of a step
  uint32_t first_signal = 0;           // the job's
};

class StepRunner {
 public:
  // The job is borrowed. `forward` is called by one thread a rank, and not before start() or follow().
  StepRunner(Job& job, const StepRunnerOptions& options, RankForward forward);
  // Process 0: ends the other ranks, and waits for those of this process.
  ~StepRunner();

  // Process 0: starts this process's ranks and waits, as long as it takes, until all ranks are ready.
  Status start();
  // Process 0, after start(): a step; logits [rows, V] f32 as in Executor. An error is the job's and final: a
  // rank that comes late may still write to logits, until the destructor has returned.
  Status run(std::span<const Batch> groups, float* logits);
  // Other processes: this process's ranks take part in steps until process 0 ends them (OK) or the job fails.
  Status follow();

  // The job's, from any thread; once run() has returned it, with the step in which it came.
  Status failure() const;

 private:
  Status run_step(std::span<const Batch> groups, float* logits);
  Status job_failure() const { return job_.endpoint(job_.first_rank()).failure(); }
  Status start_threads();
  void rank_loop(int rank);
  Status run_rank(int rank, const StepBatches& step);
  Status forward_guarded(int rank, const Batch& batch, float* logits);
  Status send_logits(int rank, const float* logits, int64_t num_bytes);
  Status take_logits(int group, float* logits, int64_t num_bytes);
  Status announce(uint32_t step);
  Status wait_done(int rank, uint32_t step);
  Status fail(const Status& status);
  bool is_local(int rank) const;
  int64_t piece_offset(int group, uint32_t piece) const;

  Job& job_;
  const StepRunnerOptions options_;
  const RankForward forward_;
  std::vector<std::thread> threads_;  // of this process's ranks but the first

  // Process 0: the step, written by rank 0 before it signals it.
  StepBatches step_;
  std::vector<uint8_t> encoded_;
  float* logits_ = nullptr;
  uint32_t last_step_ = 0;
  bool started_ = false, ends_ = false;

  mutable std::mutex mutex_;
  Status step_failure_;

  std::vector<uint32_t> pieces_;  // [dp]: sent or taken so far
};

}  // namespace fp4moe
