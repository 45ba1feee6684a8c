// StepLoop: the engine's thread. Takes requests from a inbox and runs one step after another: schedule,
// forward, sample, deliver. With an executor that samples it runs one step ahead: the next step is planned as
// if no sequence ended, and enqueued before the host looks at the tokens; rows of sequences that did end are
// dropped.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/disagg/decode_node.h"
#include "engine/output/sampler.h"
#include "engine/ranks/executor.h"
#include "engine/request_check.h"
#include "engine/schedule/dp_scheduler.h"
#include "engine/step/step_snapshot.h"
#include "engine/step/time_limits.h"
#include "engine/step/watchdog.h"
#include "fp4moe/engine.h"
#include "io/tokenizer/tokenizer.h"

namespace fp4moe {

struct PriorityRules {
  bool are_used = false;       // otherwise requests are served in order of arrival
  bool low_first = false;      // smaller values first
  bool refuse_unused = false;  // if priorities are not used, refuse requests that have one
};

struct StepLoopOptions {
  SchedulerLimits scheduler;   // over all data-parallel groups
  int64_t context_length = 0;  // maximum tokens of one request, prompt and output; must fit in a group's KV
                               // pool
  int64_t max_queued_requests = 0;
  uint64_t random_seed = 0;  // for requests without a seed
  GrammarLimits grammars;
  MaskLimits masks;
  TimeLimits time_limits;
  PriorityRules priorities;
  double watchdog_timeout = 0;  // seconds that one step may take; 0: no watchdog
  // Disaggregation: facts that a prefill node must match; empty: not a decode engine.
  KvHello hello;
  NodeLinkOptions link;
};

// The executor and the tokenizer are borrowed; only this thread and the grammar threads use them until
// destruction. submit, cancel, flush_cache, drain, stats and failure are as in Engine. A failed step (out of
// memory) fails all running requests; if the executor has failed for good, all requests. A row of logits with
// NaN fails its own request only. If the watchdog finds a step stuck, all requests fail at once and the
// engine for good; destruction still waits for the step.
class StepLoop {
 public:
  // Without a compiler, requests with a grammar are refused.
  static Result<std::unique_ptr<StepLoop>> make(Executor& executor, const Tokenizer& tokenizer,
                                                const StepLoopOptions& options,
                                                std::unique_ptr<GrammarCompiler> compiler = nullptr);
  ~StepLoop();  // aborts all requests

  Result<std::string> submit(Request request, DeltaCallback on_delta);
  // A prefill engine's request. on_held is called on the loop's thread when its first token is chosen; its
  // pages are then held. on_end is called as in submit() if the request ends before it is released.
  Result<std::string> submit_prompt(Request request, std::function<void(HeldPrompt)> on_held,
                                    DeltaCallback on_end);
  // Ends the request in whatever state it is.
  void release_prompt(const std::string& id);
  void cancel(const std::string& id);
  Status flush_cache();
  void drain(double timeout_seconds);
  EngineStats stats() const;
  Status failure() const;

 private:
  using Clock = Sequence::Clock;
  struct TokensAt {
    Clock::time_point time;
    int64_t num_tokens;  // generated since startup
  };
  struct SampledRow {
    Sequence* sequence = nullptr;
    SampledToken token;
    Status status;
    bool is_scored = false;  // token.token_id is a prompt token to score; otherwise a token is to be chosen
    std::span<const uint32_t> allowed;  // mask from the sequence's grammar; empty: all ids
  };

  // One group's rows of the current step.
  struct GroupRows {
    std::vector<int32_t> token_ids;
    std::vector<int64_t> positions, logit_rows;
    std::vector<SequenceRows> sequences;
    std::vector<int32_t> experts;  // as Batch::routed_experts; empty: no sequence requests them
  };

  StepLoop(Executor& executor, const Tokenizer& tokenizer, const StepLoopOptions& options);
  void start_grammars(std::unique_ptr<GrammarCompiler> compiler);
  void wake();  // from any thread

  // Called on the submitting thread.
  std::unique_ptr<Sequence> make_sequence(Request request, StopPatterns patterns, DeltaCallback on_delta,
                                          uint64_t ordinal) const;
  Status ignore_priority();
  Result<std::string> submit(Request request, DeltaCallback on_delta,
                             std::function<void(HeldPrompt)> on_held);

  // Called on the loop's thread.
  void run();
  bool drain_inbox();
  void enqueue(std::unique_ptr<Sequence> sequence);
  void enqueue_compiled(bool all);
  void fail(Sequence& sequence, const Status& status);
  void look_at_masks();
  bool expects_in_time(const AnswerGrammar& matcher) const;
  Clock::duration mask_wait() const;
  void take_masks();
  void advance_grammar(Sequence& sequence, int32_t id);
  void leave_grammar(Sequence& sequence);
  void make_decode_node();
  void ask_prefill_node(Sequence& sequence);
  void take_event(KvEvent event);
  void take_first_token(Sequence& sequence);
  void take_pages(Sequence& sequence);
  void take_all_pages();
  void start_decoding(Sequence& sequence);
  void count_awaited();
  void hold(SampledRow& row);
  void leave_room(Sequence& sequence);
  void count_prompt(const Sequence& sequence);
  Sequence* find(const std::string& id);
  void wait_for_input(std::unique_lock<std::mutex>& lock);
  void expire_requests();
  void run_step();
  void ask_for_step();
  Status forward_rows();
  void gather(GroupRows& rows, std::span<const ScheduledRows> step);
  void make_room_for_experts(GroupRows& rows, std::span<const ScheduledRows> step) const;
  void keep_experts(const GroupRows& rows, std::span<const ScheduledRows> step) const;
  std::shared_ptr<const std::vector<int32_t>> take_experts(Sequence& sequence) const;
  void fail_step(const std::string& error);
  void sample_rows();
  int32_t gather_allowed(const SampledRow& row);
  void start_sample();
  void take_sampled();
  void accept(SampledRow& row);
  void take_scores(std::span<SampledRow> rows);
  PositionLogprobs logprobs_of(SampledToken& token) const;
  Delta put_token(Sequence& sequence, SampledToken& token) const;
  void deliver(const Sequence& sequence, Delta& delta);
  void end(Sequence& sequence, Delta delta);
  void release_id(const std::string& id);
  void publish();

  // Called on the watchdog's thread.
  void on_stuck(const std::string& place);

  Executor& executor_;
  const Tokenizer& tokenizer_;
  const StepLoopOptions options_;
  const RequestLimits request_limits_;
  const Clock::time_point started_ = Clock::now();

  // Used by the loop's thread only.
  DpScheduler scheduler_;
  Sampler sampler_;
  std::vector<GroupRows> groups_;  // [dp]
  // Rows of the step whose tokens are not yet taken, and of the step enqueued after it. A row whose sequence
  // has ended has a null sequence.
  std::vector<SampledRow> rows_, next_rows_;
  std::vector<SampleRowParams> device_params_;
  std::vector<LogitEdit> device_edits_;
  std::vector<uint32_t> device_allowed_;
  std::vector<fp4moe::SampledRow> device_rows_;
  std::vector<std::unique_ptr<Sequence>> compiling_;  // waiting for a grammar or a first token, not yet
                                                      // scheduled
  std::vector<Sequence*> constrained_;                // sequences with a matcher
  std::vector<Sequence*> listed_;
  bool has_timeouts_ = false;  // some request has had its own timeout
  bool has_flushed_ = false;   // flushed as flush_wanted_ requested; publish() resets both
  bool is_stalled_ = false;    // no sequence has rows until there is input
  Clock::time_point last_check_;
  Clock::duration step_duration_{0};  // of the last iteration, without waiting for input
  EngineStats totals_;
  StepSnapshot snapshot_;

  // The inbox and state shared with other threads.
  mutable std::mutex mutex_;
  std::condition_variable inbox_changed_;  // there is input, or the loop is to end
  // Nothing is active or ending, the loop is stuck, or flush_wanted_ became false.
  std::condition_variable idle_;
  std::vector<std::unique_ptr<Sequence>> inbox_;
  std::vector<std::string> cancelled_ids_, released_ids_;
  std::vector<KvEvent> events_;
  std::unordered_map<std::string, std::shared_ptr<DeltaSink>> active_;  // by id; ids in here are taken
  int64_t num_ending_ = 0;  // left active_ since the last publish(); their last delta may not be delivered
                            // yet
  Status failure_;          // not OK: no further step will run
  bool draining_ = false, aborting_ = false, stopping_ = false, flush_wanted_ = false, stuck_ = false;
  bool has_grammars_ = false;  // a grammar or mask has become ready since the loop last looked
  uint64_t num_submitted_ = 0, num_named_ = 0;
  std::atomic<bool> warned_of_priority_{false};
  EngineStats stats_;
  std::deque<TokensAt> recent_;  // samples in the throughput window, and the last one before it

  std::unique_ptr<GrammarStore> grammars_;   // null without a grammar compiler
  std::unique_ptr<MaskThreads> masks_;       // likewise
  std::unique_ptr<DecodeNode> decode_node_;  // null unless this is a decode engine
  Watchdog watchdog_;
  std::thread thread_;  // last: starts once all other members are constructed
};

}  // namespace fp4moe
