// StepLoop: the engine's thread. Takes input from the inbox and runs one step after another: schedule,
// forward, sample, deliver. If the executor samples and no tokens are drafted, the loop runs one step ahead:
// it plans the next step as if no sequence had ended, and enqueues it before the host reads the tokens; rows
// of sequences that did end are dropped. With drafts it does so too if the executor accepts them, the drafter
// needs no token for the next ones, and no sequence needs a token to go on.
//
//   part             does                                                        threads
//   RequestIntake    Request -> Sequence                                         any
//   Inbox            state that the loop shares with other threads               any
//   DpScheduler      sequences and rows of the next step, KV pages               the loop's
//   StepRows         forward pass and sampling                                   the loop's
//   Drafter          tokens that may come next                                   the loop's
//   Delivery         tokens -> text, deltas, ends of sequences                   the loop's
//   GrammarManager   masks of sequences whose text must match a grammar          the loop's
//   PromptPages      prefill engine: pages that decode nodes can have            the loop's
//   RemotePrefill    decode engine: prompts that a prefill node computes         the loop's
//   StepSnapshot     a description of the step, for the watchdog                 any
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/step/delivery.h"
#include "engine/step/drafter.h"
#include "engine/step/inbox.h"
#include "engine/step/prompt_pages.h"
#include "engine/step/request_intake.h"
#include "engine/step/step_loop_options.h"
#include "engine/step/step_snapshot.h"
#include "engine/step/watchdog.h"

namespace fp4moe {

// The executor and the tokenizer are borrowed; only the loop's and the grammar threads use them until
// destruction. submit, cancel, flush_cache, drain, stats and failure work as in Engine. A failed step (for
// example, out of memory) fails all running requests, or all requests if the executor has failed permanently.
// A row of logits with NaN fails only its own request. If the watchdog finds that a step is stuck, all
// requests fail at once and the engine fails permanently; destruction still waits for the step.
//
// Large because it offers Engine's methods, and all parts of an iteration use its members.
class StepLoop {
 public:
  // Without a compiler, requests with a grammar are refused.
  static Result<std::unique_ptr<StepLoop>> make(Executor& executor, const Tokenizer& tokenizer,
                                                const StepLoopOptions& options,
                                                std::unique_ptr<GrammarCompiler> compiler = nullptr);
  ~StepLoop();  // aborts all requests

  Result<std::string> submit(Request request, DeltaCallback on_delta) {
    return intake_.submit(std::move(request), std::move(on_delta), {});
  }
  // Submits a prefill engine's request and returns the lease on its pages, whose parts open as they are
  // computed. on_held is called on the loop's thread when the first token is chosen; the last part opens
  // after that, and the request's pages are held. on_end is called like submit()'s on_delta if the request
  // ends before it is released.
  Result<std::shared_ptr<KvLease>> submit_prompt(Request request, std::function<void(FirstToken)> on_held,
                                                 DeltaCallback on_end) {
    auto pages = std::make_shared<KvLease>(executor_, std::ssize(request.input_ids));
    FP4MOE_RETURN_IF_ERROR(
        intake_.submit(std::move(request), std::move(on_end), {std::move(on_held), pages}).status());
    return pages;
  }
  // Ends the request, whatever its state.
  void release_prompt(const std::string& id) { inbox_.release(id); }
  void cancel(const std::string& id) { inbox_.cancel(id); }
  Status flush_cache() { return inbox_.flush_cache(); }
  // Runs `update` on the loop's thread when all requests so far have ended (`aborts`: they end at once), and
  // frees the cached pages. Requests that arrive meanwhile are computed after it; returns their number. An
  // error of `update` is the result, and the cached pages stay, unless it is also the executor's failure().
  Result<int64_t> update_weights(std::function<Status()> update, bool aborts) {
    return inbox_.run_when_idle(std::move(update), aborts);
  }
  // Decode engine: the facts that prefill nodes must match from now on. Only `update` may call it.
  void set_hello(KvHello hello) { remote_prefill_->set_hello(std::move(hello)); }
  Result<ExpertMoves> rebalance_experts() { return inbox_.rebalance_experts(); }
  void drain(double timeout_seconds) { inbox_.drain(timeout_seconds); }
  EngineStats stats() const { return inbox_.stats(); }
  Status failure() const { return inbox_.failure(); }

 private:
  using Clock = Sequence::Clock;
  StepLoop(Executor& executor, const Tokenizer& tokenizer, const StepLoopOptions& options,
           std::unique_ptr<GrammarCompiler> compiler);

  // Called on the loop's thread.
  void run();
  bool drain_inbox();
  void take_idle_task(IdleTask& task);
  void run_idle_task(IdleTask& task);
  void add_pending(std::unique_ptr<Sequence> sequence);
  void request_prompt(Sequence& sequence);
  void take_event(KvEvent event);
  void schedule_ready(bool all);
  void schedule(std::unique_ptr<Sequence> sequence);
  void expire_requests();
  void run_step();
  Result<ExpertMoves> rebalance();
  void rebalance_when_due();
  Status plan_and_start_step();
  bool can_plan_ahead();
  Status settle_current();
  Status draft(bool ahead = false);
  void fail_step(const std::string& error);
  Sequence* find(const std::string& id);
  void end_all(const Delta& last);
  void publish();

  // Called on the watchdog's thread.
  void on_stuck(const std::string& place);

  Executor& executor_;
  const StepLoopOptions options_;
  Inbox inbox_;
  std::unique_ptr<GrammarManager> grammars_;       // null without a grammar compiler
  std::unique_ptr<RemotePrefill> remote_prefill_;  // null unless this is a decode engine
  RequestIntake intake_;

  // Used by the loop's thread only.
  EngineStats totals_;
  DpScheduler scheduler_;
  StepRows rows_;
  PromptPages prompt_pages_;
  std::unique_ptr<Drafter> drafter_;  // null without speculative decoding
  Status ahead_;                      // of Drafter::run_ahead() in the last step
  Delivery delivery_;
  std::vector<std::unique_ptr<Sequence>> pending_;  // waiting for a grammar or a first token, not yet
                                                    // scheduled
  std::vector<Sequence*> listed_;
  int64_t steps_since_rebalance_ = 0;
  bool has_timeouts_ = false;  // some request has had its own timeout
  bool is_stalled_ = false;    // no sequence has rows until there is input
  Clock::time_point last_check_;

  StepSnapshot snapshot_;
  Watchdog watchdog_;
  std::thread thread_;  // last: starts once all other members are constructed
};

}  // namespace fp4moe
