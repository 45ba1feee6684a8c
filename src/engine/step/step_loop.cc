#include "engine/step/step_loop.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/step/adaptive_drafter.h"
#include "engine/step/model_drafter.h"
#include "engine/step/source_drafter.h"

namespace fp4moe {
namespace {

std::vector<int32_t> ids_without_token(const Tokenizer& tokenizer, int64_t vocab_size) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < vocab_size; ++id)
    if (!tokenizer.has_token(id)) ids.push_back(id);
  return ids;
}

// Returns the status that `part` returns, or an error with the message of the exception that it throws.
template <typename Part>
Status status_of(const Part& part) {
  try {
    return part();
  } catch (const std::exception& error) {
    return internal_error(error.what());
  }
}

void add_moves(const ExpertMoves& moves, ExpertMoveTotals& totals) {
  ++totals.num_rebalances;
  totals.num_experts += moves.num_experts;
  totals.num_bytes += moves.num_bytes;
  totals.seconds += moves.seconds;
  const auto bound = std::ranges::lower_bound(ExpertMoveTotals::kBounds, moves.seconds);
  ++totals.by_seconds[static_cast<size_t>(bound - ExpertMoveTotals::kBounds.begin())];
  totals.imbalance_before = moves.imbalance_before;
  totals.imbalance_after = moves.imbalance_after;
}

// Returns null without speculative decoding.
std::unique_ptr<Drafter> make_drafter(Executor& executor, const Tokenizer& tokenizer,
                                      const StepLoopOptions& options) {
  const int64_t max_drafts = options.max_drafts();
  if (max_drafts == 0) return nullptr;
  std::unique_ptr<Drafter> drafter;
  if (options.max_model_drafts > 0)
    drafter = std::make_unique<ModelDrafter>(executor, max_drafts, options.scheduler.reuses_prefixes,
                                             ids_without_token(tokenizer, executor.config().vocab_size));
  else if (options.draft_source)
    drafter = std::make_unique<SourceDrafter>(options.draft_source, max_drafts, executor.config().vocab_size);
  else
    drafter = std::make_unique<NgramDrafter>(options.drafts);
  if (!options.adaptive) return drafter;
  return std::make_unique<AdaptiveDrafter>(std::move(drafter), max_drafts, *options.adaptive);
}

// Whether steps with drafts may be in flight when the next one is planned.
bool accepts_drafts(const Executor& executor, const StepLoopOptions& options) {
  return executor.accepts_drafts() && options.max_model_drafts > 0 && !options.adaptive &&
         options.synthetic_acceptance < 0 && options.hello.facts.empty();
}

}  // namespace

// ---- start and end --------------------------------------------------------------------------------

Result<std::unique_ptr<StepLoop>> StepLoop::make(Executor& executor, const Tokenizer& tokenizer,
                                                 const StepLoopOptions& options,
                                                 std::unique_ptr<GrammarCompiler> compiler) {
  if (executor.samples())
    FP4MOE_RETURN_IF_ERROR(
        executor.set_masked_ids(ids_without_token(tokenizer, executor.config().vocab_size)));
  try {
    std::unique_ptr<StepLoop> loop(new StepLoop(executor, tokenizer, options, std::move(compiler)));
    loop->thread_ = std::thread([raw = loop.get()] { raw->run(); });
    return loop;
  } catch (const std::exception& error) {
    return does_not_fit(std::string("cannot start the engine's thread: ") + error.what());
  }
}

StepLoop::StepLoop(Executor& executor, const Tokenizer& tokenizer, const StepLoopOptions& options,
                   std::unique_ptr<GrammarCompiler> compiler)
    : executor_(executor),
      options_(options),
      inbox_(executor, options.max_queued_requests),
      grammars_(compiler == nullptr ? nullptr
                                    : std::make_unique<GrammarManager>(std::move(compiler), options_,
                                                                       executor, [this] { inbox_.wake(); })),
      remote_prefill_(
          options.hello.facts.empty()
              ? nullptr
              : std::make_unique<RemotePrefill>(
                    executor, options_, [this](KvEvent event) { inbox_.add_event(std::move(event)); })),
      intake_(executor, tokenizer, options_, inbox_, grammars_.get(), remote_prefill_.get()),
      scheduler_(executor.num_groups(), group_limits(options.scheduler, executor.num_groups()),
                 {.num_pages = executor.num_kv_pages(),
                  .page_size = executor.page_size(),
                  .num_window_pages = executor.num_window_pages(),
                  .window = executor.window().tokens,
                  .num_slots = executor.num_slots()}),
      rows_(executor, ids_without_token(tokenizer, executor.config().vocab_size),
            {.can_exist = options.max_drafts() > 0,
             .synthetic_acceptance = options.synthetic_acceptance,
             .are_accepted = accepts_drafts(executor, options)}),
      prompt_pages_(executor),
      drafter_(make_drafter(executor, tokenizer, options)),
      delivery_({executor, tokenizer, scheduler_, rows_, inbox_, totals_, grammars_.get(),
                 remote_prefill_.get(), drafter_.get()}),
      watchdog_(options.watchdog_timeout, [this](const std::string& place) { on_stuck(place); }) {
  totals_.max_total_num_tokens = scheduler_.num_pages() * executor.page_size();
  totals_.spec_proposed_by_position.resize(static_cast<size_t>(options.max_drafts()));
  totals_.spec_correct_by_position = totals_.spec_proposed_by_position;
  const int64_t group_tokens = executor.num_kv_pages() * executor.page_size();
  FP4MOE_CHECK(options.context_length <= group_tokens,
               "a context of " + std::to_string(options.context_length) +
                   " tokens does not fit in a KV pool of " + std::to_string(group_tokens));
  publish();
}

StepLoop::~StepLoop() {
  inbox_.stop();
  if (thread_.joinable()) thread_.join();
  grammars_.reset();  // its threads and those of remote_prefill_ call inbox_
  remote_prefill_.reset();
}

// ---- the loop -------------------------------------------------------------------------------------

void StepLoop::run() {
  while (drain_inbox()) {
    expire_requests();
    run_step();
    rebalance_when_due();
    publish();
    watchdog_.leave();
  }
  publish();
}

// Waits for something to do and handles the input. Returns false at the end, after ending all requests.
bool StepLoop::drain_inbox() {
  const bool has_scheduled = scheduler_.first() != nullptr;
  const bool can_step = (has_scheduled && !is_stalled_) || !rows_.current().empty();
  LoopInput input = inbox_.wait(can_step, /*has_requests=*/has_scheduled || !pending_.empty());

  if (input.flushes) scheduler_.flush();
  const bool awaits_task = input.idle_task != nullptr && input.idle_task->is_known;
  for (auto& sequence : input.sequences) {
    sequence->awaits_idle_task = awaits_task;
    add_pending(std::move(sequence));
  }
  for (KvEvent& event : input.events) take_event(std::move(event));
  schedule_ready(/*all=*/input.aborts || !input.failure.ok());
  for (const std::string& id : input.cancelled_ids)
    if (Sequence* sequence = find(id)) delivery_.end(*sequence, {.finish_reason = FinishReason::kAbort});
  for (const std::string& id : input.released_ids)
    if (Sequence* sequence = find(id)) {
      const bool was_held = sequence->times.held != Clock::time_point();
      delivery_.end(*sequence, {.finish_reason = was_held ? FinishReason::kLength : FinishReason::kAbort});
    }
  if (!input.failure.ok())  // requests submitted before the failure was visible
    end_all({.finish_reason = FinishReason::kError, .error = input.failure.message()});
  if (input.aborts) end_all({.finish_reason = FinishReason::kAbort});
  if (input.idle_task != nullptr) take_idle_task(*input.idle_task);
  if (input.rebalances) inbox_.end_rebalance(rebalance());
  return !input.stops;
}

// Runs the task once all requests submitted before it have ended.
void StepLoop::take_idle_task(IdleTask& task) {
  if (!std::exchange(task.is_known, true) && task.aborts) {
    schedule_ready(/*all=*/true);
    end_all({.finish_reason = FinishReason::kAbort});
  }
  const Status failure = inbox_.failure();
  if (!failure.ok()) return inbox_.end_idle_task(failure, 0);
  const bool is_idle = scheduler_.first() == nullptr && rows_.current().empty() &&
                       std::ranges::all_of(pending_, [](const auto& s) { return s->awaits_idle_task; });
  if (is_idle && inbox_.start_idle_task()) run_idle_task(task);
}

// The drafter first extends the rows of sequences that ended in the last step. The watchdog does not watch
// the task.
void StepLoop::run_idle_task(IdleTask& task) {
  Status status = drafter_ == nullptr ? Status() : draft();
  if (status.ok()) status = status_of([&] { return task.run(); });
  const Status failure = executor_.failure();
  if (status.ok()) scheduler_.flush();
  if (!failure.ok()) inbox_.fail(failure);
  const int64_t num_waited = std::ssize(pending_);
  listed_.clear();
  for (const auto& sequence : pending_) {
    sequence->awaits_idle_task = false;
    listed_.push_back(sequence.get());
  }
  if (failure.ok())
    for (Sequence* sequence : listed_) request_prompt(*sequence);  // removes those that fail
  schedule_ready(/*all=*/!failure.ok());
  if (!failure.ok()) end_all({.finish_reason = FinishReason::kError, .error = failure.message()});
  publish();
  inbox_.end_idle_task(failure.ok() ? status : failure, num_waited);
}

// Adds the moves to the totals and publishes them. Requests wait meanwhile. The pages and the rows in flight
// do not depend on where experts are.
Result<ExpertMoves> StepLoop::rebalance() {
  watchdog_.enter("moving experts");
  steps_since_rebalance_ = 0;
  ExpertMoves moves;
  const auto started = Clock::now();
  const Status status = status_of([&]() -> Status {
    FP4MOE_ASSIGN_OR_RETURN(moves, executor_.rebalance_experts());
    return {};
  });
  moves.seconds = std::chrono::duration<double>(Clock::now() - started).count();
  watchdog_.leave();
  if (!status.ok()) {
    if (!executor_.failure().ok()) fail_step(status.message());
    return status;
  }
  char text[160];
  std::snprintf(
      text, sizeof text,
      "experts    %lld moved in %lld layers (%.1f MB, %.3f s); busiest rank %.2f -> %.2f of the mean",
      static_cast<long long>(moves.num_experts), static_cast<long long>(moves.num_layers),
      static_cast<double>(moves.num_bytes) / 1e6, moves.seconds, moves.imbalance_before,
      moves.imbalance_after);
  log_info(text);
  add_moves(moves, totals_.expert_moves);
  publish();
  return moves;
}

void StepLoop::rebalance_when_due() {
  if (options_.rebalance_interval == 0 || steps_since_rebalance_ < options_.rebalance_interval) return;
  if (const auto moves = rebalance(); !moves.ok())
    log_error("experts were not moved: " + moves.status().message());
}

// Checks the requests only once per kInterval, because the queue may be long.
void StepLoop::expire_requests() {
  constexpr std::chrono::milliseconds kInterval(20);
  const TimeLimits& limits = options_.time_limits;
  const auto now = Clock::now();
  if (!(limits.waiting > 0 || limits.running > 0 || limits.held > 0 || has_timeouts_) ||
      now - last_check_ < kInterval)
    return;
  last_check_ = now;
  listed_.clear();
  scheduler_.list(listed_);
  for (const auto& sequence : pending_) listed_.push_back(sequence.get());
  for (Sequence* sequence : listed_) {
    const Status status = check_time(*sequence, limits, now);
    if (status.ok()) continue;
    ++totals_.num_timed_out_requests_total;
    delivery_.fail(*find(sequence->id), status);
  }
}

// Starts the next step and delivers the tokens of the current one. If the loop runs ahead, these are two
// different steps: the executor computes the next one meanwhile. Otherwise they are the same step (see the
// table in step_rows.h).
void StepLoop::run_step() {
  const auto started = Clock::now();
  Status status = status_of([this] { return plan_and_start_step(); });
  if (!status.ok()) rows_.discard_next();
  watchdog_.enter("waiting for the sampled tokens");
  if (Status taken = status_of([this] { return rows_.take_sampled(); }); !taken.ok()) {
    rows_.discard_current();
    status = std::move(taken);
  }
  if (drafter_ != nullptr)
    drafter_->finish_step(std::chrono::duration<double>(Clock::now() - started).count());
  watchdog_.enter("delivering the tokens");
  delivery_.take_rows(rows_.current());
  rows_.advance();
  if (rows_.has_drafts_in_flight()) drafter_->settle_step();
  if (status.ok()) status = status_of([this] { return prompt_pages_.open_staged(); });
  if (!status.ok()) fail_step(status.message());
  if (grammars_ != nullptr) grammars_->set_step_duration(Clock::now() - started);
}

// Plans, computes and samples the next step, if any sequence has rows. If the loop runs ahead, the executor
// only enqueues the computation and the sampling.
Status StepLoop::plan_and_start_step() {
  watchdog_.enter("planning");
  if (grammars_ != nullptr) {
    const std::vector<Sequence*> constrained = grammars_->sequences();  // end() removes some
    for (Sequence* sequence : constrained)
      if (std::optional<Delta> last = grammars_->check(*sequence)) delivery_.end(*sequence, std::move(*last));
  }
  const bool is_ahead = rows_.has_drafts_in_flight() && can_plan_ahead();
  if (rows_.has_drafts_in_flight() && !is_ahead) FP4MOE_RETURN_IF_ERROR(settle_current());
  if (drafter_ != nullptr) {
    watchdog_.enter("drafting");
    const Status drafted = draft(is_ahead);
    delivery_.open_held_pages(drafted);
    FP4MOE_RETURN_IF_ERROR(drafted);
    watchdog_.enter("planning");
    if (grammars_ != nullptr) grammars_->drop_drafts();
  }
  const bool has_rows = scheduler_.plan_step(/*admits=*/!is_ahead);
  is_stalled_ = !has_rows && rows_.current().empty();
  if (remote_prefill_ != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(const bool can_decode, remote_prefill_->fetch_pages(pending_, scheduler_));
    if (can_decode) is_stalled_ = false;
  }
  if (!has_rows) return {};
  prompt_pages_.stage(scheduler_);
  if (grammars_ != nullptr) grammars_->look_ahead(scheduler_);
  snapshot_.take(scheduler_);
  watchdog_.enter("the forward pass");
  FP4MOE_RETURN_IF_ERROR(rows_.forward(scheduler_));
  ++steps_since_rebalance_;
  if (drafter_ != nullptr) drafter_->keep_step(scheduler_);
  watchdog_.enter("sampling");
  if (grammars_ != nullptr) grammars_->attach_masks(rows_.next(), scheduler_);
  scheduler_.commit_step();
  FP4MOE_RETURN_IF_ERROR(rows_.start_sample());
  if (drafter_ != nullptr) {
    const int64_t num_sampled = std::ssize(rows_.next());
    ahead_ = status_of([&] { return drafter_->run_ahead(num_sampled); });
  }
  return rows_.sample(drafter_ != nullptr && drafter_->has_run_ahead() && rows_.can_stay());
}

// Whether the next step can be planned, and its drafts be drafted, without the tokens of the step in flight.
// If so, its sequences have the pages for that.
bool StepLoop::can_plan_ahead() {
  return ahead_.ok() && drafter_->has_run_ahead() && scheduler_.reserve_ahead();
}

// Takes and delivers the tokens of the step in flight.
Status StepLoop::settle_current() {
  watchdog_.enter("waiting for the sampled tokens");
  const Status status = status_of([this] { return rows_.take_sampled(); });
  if (!status.ok()) rows_.discard_current();
  watchdog_.enter("delivering the tokens");
  delivery_.take_rows(rows_.current());
  rows_.advance();
  return status;
}

Status StepLoop::draft(bool ahead) {
  const Status status = std::exchange(ahead_, {});
  if (!status.ok()) return status;
  return status_of([&] { return ahead ? drafter_->draft_ahead(scheduler_) : drafter_->draft(scheduler_); });
}

// Ends all running requests with the error. If no further step can run, ends all scheduled requests with the
// executor's failure instead.
void StepLoop::fail_step(const std::string& error) {
  const Status failure = executor_.failure();
  if (!failure.ok()) {
    inbox_.fail(failure);
    return end_all({.finish_reason = FinishReason::kError, .error = failure.message()});
  }
  log_error("a step failed and ended all running requests: " + error);
  while (scheduler_.num_running() > 0)
    delivery_.end(*scheduler_.first(), {.finish_reason = FinishReason::kError, .error = error});
  scheduler_.drop_snapshots();
}

// ---- sequences ------------------------------------------------------------------------------------

void StepLoop::add_pending(std::unique_ptr<Sequence> owned) {
  Sequence& sequence = *pending_.emplace_back(std::move(owned));
  has_timeouts_ = has_timeouts_ || sequence.request.timeout_seconds > 0;
  if (!sequence.awaits_idle_task) request_prompt(sequence);
}

// Requests the prompt from its prefill node, if it has one.
void StepLoop::request_prompt(Sequence& sequence) {
  if (sequence.disagg.prefill_node.empty()) return;
  if (const Status status = remote_prefill_->request(sequence); !status.ok())
    delivery_.fail(*find(sequence.id), status);
}

// Handles an event; ignores events for finished requests and abandoned rooms.
void StepLoop::take_event(KvEvent event) {
  const auto pending = std::ranges::find_if(pending_, [&](const auto& s) { return s->id == event.id; });
  const bool is_pending = pending != pending_.end();
  Sequence* sequence = is_pending ? pending->get() : scheduler_.find(event.id);
  if (sequence == nullptr || sequence->disagg.room != event.room) return;
  const Status status = remote_prefill_->take_event(*sequence, std::move(event), is_pending, scheduler_);
  if (!status.ok()) delivery_.fail(*find(sequence->id), status);
}

// Schedules the sequences that await no task and whose grammar and first token are ready or not needed; with
// `all`, schedules all sequences, so that they can be ended.
void StepLoop::schedule_ready(bool all) {
  for (auto& sequence : pending_) {
    const GrammarTicket& ticket = sequence->grammar.ticket;
    const bool has_grammar = !ticket.valid() || ticket.is_ready();
    const bool has_first_token =
        sequence->disagg.prefill_node.empty() || sequence->disagg.first_token.has_value();
    if (all)
      scheduler_.enqueue(std::move(sequence));
    else if (has_grammar && has_first_token && !sequence->awaits_idle_task)
      schedule(std::move(sequence));
  }
  std::erase(pending_, nullptr);
}

// Queues a sequence, or ends it if its grammar is wrong or it has nothing to compute.
void StepLoop::schedule(std::unique_ptr<Sequence> owned) {
  Sequence& sequence = *owned;
  const bool has_first_token = sequence.disagg.first_token.has_value();
  scheduler_.enqueue(std::move(owned));
  const GrammarTicket ticket = std::exchange(sequence.grammar.ticket, {});
  if (ticket.valid() && !ticket.get().ok()) return delivery_.fail(sequence, ticket.get().status());
  if (sequence.is_over() && !has_first_token)  // max_new_tokens = 0 and no prompt output requested
    return delivery_.end(sequence, {.finish_reason = FinishReason::kLength});
  const bool chooses_tokens = sequence.max_tokens > sequence.num_prompt_tokens;
  if (ticket.valid() && chooses_tokens) grammars_->add(sequence, *ticket.get());
  if (has_first_token)
    delivery_.take_first_token(sequence);
  else if (sequence.grammar.matcher != nullptr)
    grammars_->start(sequence);
}

// Returns null if there is no such sequence. Moves a pending sequence to the scheduler, so that it can be
// ended.
Sequence* StepLoop::find(const std::string& id) {
  const auto found = std::ranges::find_if(pending_, [&](const auto& s) { return s->id == id; });
  if (found == pending_.end()) return scheduler_.find(id);
  scheduler_.enqueue(std::move(*found));
  pending_.erase(found);
  return scheduler_.find(id);
}

// Ends all scheduled sequences.
void StepLoop::end_all(const Delta& last) {
  while (Sequence* sequence = scheduler_.first()) delivery_.end(*sequence, last);
}

// ---- other threads --------------------------------------------------------------------------------

// Makes the iteration's changes visible to other threads.
void StepLoop::publish() {
  totals_.num_running_reqs = scheduler_.num_running();
  totals_.num_queue_reqs = scheduler_.num_waiting() + std::ssize(pending_);
  totals_.num_held_reqs = scheduler_.num_held();
  totals_.num_grammar_queue_reqs = std::ranges::count_if(
      pending_, [](const auto& s) { return s->grammar.ticket.valid() && !s->grammar.ticket.is_ready(); });
  if (grammars_ != nullptr) totals_.num_grammar_queue_reqs += grammars_->num_awaiting_masks();
  if (remote_prefill_ != nullptr) {
    put_traffic(remote_prefill_->traffic(), totals_);
    totals_.num_awaited_reqs = std::ranges::count_if(
        pending_, [](const auto& s) { return !s->disagg.prefill_node.empty() && !s->disagg.first_token; });
    listed_.clear();
    scheduler_.list(listed_);
    totals_.num_transferring_reqs =
        std::ranges::count_if(listed_, [](const Sequence* s) { return s->disagg.awaits_pages; });
  }
  totals_.num_retracted_reqs = scheduler_.num_retracted();
  totals_.new_token_ratio = scheduler_.new_token_ratio();
  totals_.num_pages = scheduler_.num_pages();
  totals_.num_free_pages = scheduler_.num_free_pages();
  totals_.num_cached_pages = scheduler_.num_cached_pages();
  totals_.num_used_pages = scheduler_.num_used_pages();
  totals_.num_window_pages = scheduler_.num_window_pages();
  totals_.num_free_window_pages = scheduler_.num_free_window_pages();
  totals_.num_cached_window_pages = scheduler_.num_cached_window_pages();
  totals_.num_used_window_pages = scheduler_.num_used_window_pages();
  totals_.num_state_slots = scheduler_.num_slots();
  totals_.num_used_state_slots = scheduler_.num_used_slots();
  totals_.num_state_snapshots = scheduler_.num_snapshots();
  totals_.num_leaked_pages = scheduler_.num_leaked_pages();
  totals_.num_used_tokens = totals_.num_used_pages * executor_.page_size();
  inbox_.publish(totals_);
}

// Ends the requests on this thread, because the loop's thread is stuck in a call.
void StepLoop::on_stuck(const std::string& place) {
  char after[48];
  std::snprintf(after, sizeof after, " for %g s (--watchdog-timeout)", options_.watchdog_timeout);
  const Status failure = internal_error("the engine has been stuck in " + place + after);
  log_error(failure.message());
  for (const std::string& line : snapshot_.lines()) log_error("  " + line);
  inbox_.abandon(failure);
}

}  // namespace fp4moe
