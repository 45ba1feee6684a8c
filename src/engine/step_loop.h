// StepLoop: the engine's thread. Takes requests from a mailbox and runs one step after another: schedule,
// forward, sample, deliver. An executor that samples is one step ahead: the next step is planned as if no
// sequence ended, and queued before the tokens are looked at; a row of a sequence that did end is dropped.
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

#include "engine/decode_node.h"
#include "engine/dp_scheduler.h"
#include "engine/executor.h"
#include "engine/request_check.h"
#include "engine/sampler.h"
#include "engine/step_note.h"
#include "engine/time_limits.h"
#include "engine/watchdog.h"
#include "fp4moe/engine.h"
#include "io/tokenizer.h"

namespace fp4moe {

struct PriorityRules {
  bool are_used = false;       // else requests are served as they came
  bool low_first = false;      // smaller ones before larger ones
  bool refuse_unused = false;  // where none is used, requests that have one
};

struct StepLoopOptions {
  SchedulerLimits scheduler;   // of all data-parallel groups together
  int64_t context_length = 0;  // tokens of one request, prompt and answer; a group's KV pool holds them
  int64_t max_queued_requests = 0;
  uint64_t random_seed = 0;  // of requests that name no seed
  GrammarLimits grammars;
  MaskLimits masks;
  TimeLimits time_limits;
  PriorityRules priorities;
  double watchdog_timeout = 0;  // seconds of one step; 0: no watchdog
  // Disaggregation: what another node must serve too; empty: this engine has no part in it.
  KvHello hello;
  NodeLinkOptions link;
};

// Executor and tokenizer are borrowed, and used by this thread and the grammars' alone, until destruction.
// submit, cancel, flush_cache, drain, stats and failure are as in Engine. A step that fails (out of memory)
// fails all running requests; when the executor has failed for good, all requests. A row of logits that holds
// NaN fails its own request. A step that the watchdog finds stuck fails all requests at once, and the engine
// for good; destruction waits for it.
class StepLoop {
 public:
  // Without a compiler, requests with a grammar are refused.
  static Result<std::unique_ptr<StepLoop>> make(Executor& executor, const Tokenizer& tokenizer,
                                                const StepLoopOptions& options,
                                                std::unique_ptr<GrammarCompiler> compiler = nullptr);
  ~StepLoop();  // aborts what runs

  Result<std::string> submit(Request request, DeltaCallback on_delta);
  // A prefill engine's request: on_held when its first token is chosen, on the loop's thread, then its pages
  // are held; on_end as submit's, if it ends before it is released.
  Result<std::string> submit_prompt(Request request, std::function<void(HeldPrompt)> on_held,
                                    DeltaCallback on_end);
  // Ends it, wherever it is.
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
    int64_t num_tokens;  // generated since the start
  };
  struct SampledRow {
    Sequence* sequence = nullptr;
    SampledToken token;
    Status status;
    bool is_scored = false;             // token.token_id is the prompt's; else it is to be chosen
    std::span<const uint32_t> allowed;  // by the sequence's grammar; empty: all ids
  };

  // One group's rows of the current step.
  struct GroupRows {
    std::vector<int32_t> token_ids;
    std::vector<int64_t> positions, logit_rows;
    std::vector<SequenceRows> sequences;
    std::vector<int32_t> experts;  // as Batch::routed_experts; empty: nobody wants them
  };

  StepLoop(Executor& executor, const Tokenizer& tokenizer, const StepLoopOptions& options);
  void start_grammars(std::unique_ptr<GrammarCompiler> compiler);
  void wake();  // from any thread

  // On the caller's thread.
  std::unique_ptr<Sequence> make_sequence(Request request, StopPatterns patterns, DeltaCallback on_delta,
                                          uint64_t ordinal) const;
  Status ignore_priority();
  Result<std::string> submit(Request request, DeltaCallback on_delta,
                             std::function<void(HeldPrompt)> on_held);

  // On the loop's thread.
  void run();
  bool take_mail();
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
  void take_news(KvNews news);
  void take_first_token(Sequence& sequence);
  void take_pages(Sequence& sequence);
  void take_all_pages();
  void start_decoding(Sequence& sequence);
  void count_awaited();
  void hold(SampledRow& row);
  void leave_room(Sequence& sequence);
  void count_prompt(const Sequence& sequence);
  Sequence* find(const std::string& id);
  void wait_for_mail(std::unique_lock<std::mutex>& lock);
  void end_late_ones();
  void run_step();
  void ask_for_step();
  Status forward();
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

  // On the watchdog's thread.
  void on_stuck(const std::string& place);

  Executor& executor_;
  const Tokenizer& tokenizer_;
  const StepLoopOptions options_;
  const RequestLimits request_limits_;
  const Clock::time_point started_ = Clock::now();

  // The loop's own.
  DpScheduler scheduler_;
  Sampler sampler_;
  std::vector<GroupRows> groups_;  // [dp]
  // Of the step whose tokens are not yet taken, and of the one asked for behind it. A row whose sequence has
  // ended has none any more.
  std::vector<SampledRow> rows_, next_rows_;
  std::vector<SampleRowParams> device_params_;
  std::vector<LogitEdit> device_edits_;
  std::vector<uint32_t> device_allowed_;
  std::vector<fp4moe::SampledRow> device_rows_;
  std::vector<std::unique_ptr<Sequence>> compiling_;  // they wait for their grammars, or first tokens
  std::vector<Sequence*> constrained_;                // those that have a matcher
  std::vector<Sequence*> listed_;
  bool has_timeouts_ = false;  // some request had a limit of its own
  bool has_flushed_ = false;   // as flush_wanted_ asked, which publish() takes back
  bool is_stalled_ = false;    // no sequence has rows before there is mail
  Clock::time_point last_check_;
  Clock::duration step_duration_{0};  // of the last iteration, without waiting for mail
  EngineStats totals_;
  StepNote note_;

  // The mailbox and what others may see.
  mutable std::mutex mutex_;
  std::condition_variable mail_;  // there is mail, or the end
  std::condition_variable
      idle_;  // nothing is active or ending, the loop is stuck, or flush_wanted_ became false
  std::vector<std::unique_ptr<Sequence>> inbox_;
  std::vector<std::string> cancelled_ids_, released_ids_;
  std::vector<KvNews> news_;
  std::unordered_map<std::string, std::shared_ptr<Outlet>> active_;  // by id, which others may not have
  int64_t num_ending_ = 0;  // of those that were, since the last publish(): their last delta is on its way
  Status failure_;          // not OK: no step will run any more
  bool draining_ = false, aborting_ = false, stopping_ = false, flush_wanted_ = false, stuck_ = false;
  bool has_grammars_ = false;  // grammars or masks that sequences wait for, since the loop looked
  uint64_t num_submitted_ = 0, num_named_ = 0;
  std::atomic<bool> warned_of_priority_{false};
  EngineStats stats_;
  std::deque<TokensAt> recent_;  // over the throughput window, and the sample before it

  std::unique_ptr<GrammarStore> grammars_;   // or null
  std::unique_ptr<MaskThreads> masks_;       // likewise
  std::unique_ptr<DecodeNode> decode_node_;  // or null: disaggregation is not for this engine
  Watchdog watchdog_;
  std::thread thread_;  // last: starts when all else is made
};

}  // namespace fp4moe
