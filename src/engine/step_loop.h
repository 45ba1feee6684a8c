// StepLoop: the engine's thread. Takes requests from a mailbox and runs one step after another: schedule,
// forward, sample, deliver.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "engine/request_check.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "fp4moe/engine.h"
#include "io/tokenizer.h"
#include "model/kv_cache.h"
#include "model/model.h"

namespace fp4moe {

struct StepLoopOptions {
  SchedulerLimits scheduler;
  int64_t context_length = 0;  // tokens of one request, prompt and answer; the KV pool holds them
  int64_t max_queued_requests = 0;
  uint64_t random_seed = 0;  // of requests that name no seed
};

// Model, tokenizer and pool are borrowed, and used by this thread alone, until destruction. submit, cancel,
// drain and stats are as in Engine. A step that fails (out of memory) fails all running requests; a row of
// logits that holds NaN fails its own request.
class StepLoop {
 public:
  static Result<std::unique_ptr<StepLoop>> make(Model& model, KvCache kv, const Tokenizer& tokenizer,
                                                ThreadPool& pool, const StepLoopOptions& options);
  ~StepLoop();  // aborts what runs

  Result<std::string> submit(Request request, DeltaCallback on_delta);
  void cancel(const std::string& id);
  void drain(double timeout_seconds);
  EngineStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct TokensAt {
    Clock::time_point time;
    int64_t num_tokens;  // generated since the start
  };
  struct SampledRow {
    Sequence* sequence = nullptr;
    SampledToken token;
    Status status;
  };

  StepLoop(Model& model, KvCache kv, const Tokenizer& tokenizer, ThreadPool& pool,
           const StepLoopOptions& options);

  // On the caller's thread.
  std::unique_ptr<Sequence> make_sequence(Request request, DeltaCallback on_delta, uint64_t ordinal) const;

  // On the loop's thread.
  void run();
  bool take_mail();
  void run_step();
  Status forward(const std::vector<ScheduledRows>& step);
  void sample_rows();
  void accept(SampledRow& row);
  Delta append_token(Sequence& sequence, SampledToken& token) const;
  void deliver(const Sequence& sequence, Delta& delta);
  void end(Sequence& sequence, Delta delta);
  void publish();

  Model& model_;
  KvCache kv_;
  const Tokenizer& tokenizer_;
  ThreadPool& pool_;
  const StepLoopOptions options_;
  const RequestLimits request_limits_;
  const Clock::time_point started_ = Clock::now();

  // The loop's own.
  Scheduler scheduler_;
  Sampler sampler_;
  Buffer logits_;                       // [max_running_requests, V] f32
  std::vector<SampledRow> rows_;        // of the current step
  std::vector<std::string> ended_ids_;  // since the last publish()
  EngineStats totals_;

  // The mailbox and what others may see.
  mutable std::mutex mutex_;
  std::condition_variable mail_;  // there is mail, or the end
  std::condition_variable idle_;  // active_ids_ became empty
  std::vector<std::unique_ptr<Sequence>> inbox_;
  std::vector<std::string> cancelled_ids_;
  std::unordered_set<std::string> active_ids_;  // submitted, last delta not delivered
  bool draining_ = false, aborting_ = false, stopping_ = false;
  uint64_t num_submitted_ = 0, num_named_ = 0;
  EngineStats stats_;
  std::deque<TokensAt> recent_;  // over the throughput window, and the sample before it

  std::thread thread_;  // last: starts when all else is made
};

}  // namespace fp4moe
