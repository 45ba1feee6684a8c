// StepRunner: runs steps on all ranks of a job together. The caller's thread is rank 0's; each other rank of
// this process has its own thread, and ranks in other processes follow process 0.
//
// A step uses the signal slots 12 to 15 (comm/endpoint.h); n counts from first_signal + 1:
//   0 -> r  kStep   n      the batches (or the text of a task) are ready: in memory for ranks of process 0,
//   otherwise in r's heap r -> 0  kDone   n + 1  r has finished the step (the first such signal: r is ready)
//   g -> 0  kLogits i      piece i of the logits of g, the first rank of a group in another process, is in
//                          rank 0's heap; g's pieces alternate between two buffers
//   0 -> g  kTaken  i      rank 0 has copied piece i
// Rank 0 returns when all ranks are done, so the next step may overwrite this step's data.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/job.h"
#include "engine/ranks/step_batches.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

// Offsets of the step data in a rank's heap.
struct StepRegion {
  int64_t step_offset = 0;    // 64-byte aligned; an encoded step
  int64_t logits_offset = 0;  // 64-byte aligned; two pieces of logits per group
  int64_t piece_bytes = 0;    // size of one piece

  static int64_t step_bytes(const StepLimits& limits);
  int64_t logits_bytes(const StepLimits& limits) const { return limits.num_groups * 2 * piece_bytes; }
};

// Returns `reason` with the words that a rank's thread cannot be started. Without memory for them, its code
// alone.
Status no_thread_for(int rank, const Status& reason);

// Runs one rank's model; logits is null except on a group's first rank.
using RankForward = std::function<Status(int rank, const Batch& batch, float* logits)>;
// Runs one rank's part of a task that is not a step.
using RankTask = std::function<Status(int rank, const std::string& text)>;

struct StepRunnerOptions {
  RankLayout layout;  // tp ranks in dp groups
  StepLimits limits;
  StepRegion region;
  std::chrono::nanoseconds timeout{};  // how long rank 0 waits for another rank after finishing its own part
                                       // of a step
  uint32_t first_signal = 0;           // the job's first signal value
};

class StepRunner {
 public:
  // The job is borrowed. `forward` and `task` are called on one thread per rank, only after start() or
  // follow().
  StepRunner(Job& job, const StepRunnerOptions& options, RankForward forward, RankTask task = {});
  // Process 0: signals the other ranks to end, and joins this process's threads.
  ~StepRunner();

  // Process 0: starts this process's ranks and waits, without a time limit, until all ranks are ready.
  Status start();
  // Process 0, after start(): runs one step; logits [rows, V] f32 as in Executor. An error fails the job
  // permanently. After an error, a late rank may still write to `logits` until the destructor has returned.
  Status run_on_ranks(std::span<const Batch> groups, float* logits);
  // Process 0, after start(): runs the task with this text, which is not empty, on all ranks and waits for
  // them without a time limit. An error fails the job permanently.
  Status run_task(const std::string& text);
  // Other processes: runs this process's ranks until process 0 ends them (OK) or the job fails.
  Status follow();

  // Returns the job's failure, with the step's number once run_on_ranks() has returned it. Thread-safe.
  Status failure() const;

 private:
  Status run_step(std::span<const Batch> groups, float* logits);
  Status keep_failure(const char* op, const Status& status);
  Status job_failure() const { return job_.endpoint(job_.first_rank()).failure(); }
  Status start_threads();
  void rank_loop(int rank);
  Status run_steps(int rank);
  Status run_rank(int rank, const StepBatches& step);
  Status run_guarded(int rank, const std::function<Status()>& part);
  Status forward_guarded(int rank, const Batch& batch, float* logits);
  Status task_guarded(int rank, const std::string& text);
  Status send_logits(int rank, const float* logits, int64_t num_bytes);
  Status take_logits(int group, float* logits, int64_t num_bytes);
  Status announce(uint32_t step);
  Status wait_done(int rank, uint32_t step, std::chrono::nanoseconds timeout);
  Status fail(const Status& status);
  bool is_local(int rank) const;
  int64_t piece_offset(int group, uint32_t piece) const;

  Job& job_;
  const StepRunnerOptions options_;
  const RankForward forward_;
  const RankTask task_;
  std::vector<std::thread> threads_;  // one for each rank of this process except the first

  // Process 0: the current step, written by rank 0 before it signals the step.
  StepBatches step_;
  std::vector<uint8_t> encoded_;
  float* logits_ = nullptr;
  std::string task_text_;  // not empty: a task instead of a step
  uint32_t last_step_ = 0;
  bool started_ = false, ends_ = false;

  mutable std::mutex mutex_;
  Status step_failure_;

  std::vector<uint32_t> pieces_;  // [dp]: first_signal plus the number of pieces sent or received so far
};

}  // namespace fp4moe
