#include "engine/step/step_loop.h"

#include <algorithm>
#include <exception>
#include <span>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace fp4moe {
namespace {

std::vector<int32_t> ids_without_token(const Tokenizer& tokenizer, int64_t vocab_size) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < vocab_size; ++id)
    if (!tokenizer.has_token(id)) ids.push_back(id);
  return ids;
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Result<std::unique_ptr<StepLoop>> StepLoop::make(Executor& executor, const Tokenizer& tokenizer,
                                                 const StepLoopOptions& options,
                                                 std::unique_ptr<GrammarCompiler> compiler) {
  if (executor.samples())
    FP4MOE_RETURN_IF_ERROR(
        executor.set_masked_ids(ids_without_token(tokenizer, executor.config().vocab_size)));
  try {
    std::unique_ptr<StepLoop> loop(new StepLoop(executor, tokenizer, options));
    if (compiler != nullptr) loop->start_grammars(std::move(compiler));
    loop->thread_ = std::thread([raw = loop.get()] { raw->run(); });
    return loop;
  } catch (const std::exception& error) {
    return does_not_fit(std::string("no thread for the engine: ") + error.what());
  }
}

StepLoop::StepLoop(Executor& executor, const Tokenizer& tokenizer, const StepLoopOptions& options)
    : executor_(executor),
      tokenizer_(tokenizer),
      options_(options),
      request_limits_{executor.config().vocab_size, options.context_length},
      scheduler_(executor.num_groups(), group_limits(options.scheduler, executor.num_groups()),
                 executor.num_kv_pages(), executor.page_size()),
      sampler_(executor.config().vocab_size, ids_without_token(tokenizer, executor.config().vocab_size)),
      groups_(static_cast<size_t>(executor.num_groups())),
      watchdog_(options.watchdog_timeout, [this](const std::string& place) { on_stuck(place); }) {
  if (!options.hello.facts.empty()) make_decode_node();
  totals_.max_total_num_tokens = scheduler_.num_pages() * executor.page_size();
  const int64_t group_tokens = executor.num_kv_pages() * executor.page_size();
  FP4MOE_CHECK(options.context_length <= group_tokens,
               "a context of " + std::to_string(options.context_length) + " tokens in a KV pool of " +
                   std::to_string(group_tokens));
  publish();
}

StepLoop::~StepLoop() {
  {
    std::lock_guard lock(mutex_);
    draining_ = aborting_ = stopping_ = true;
  }
  inbox_changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  masks_.reset();  // their threads call this object
  grammars_.reset();
  decode_node_.reset();
}

void StepLoop::run() {
  while (drain_inbox()) {
    expire_requests();
    run_step();
    publish();
    watchdog_.leave();
  }
  publish();
}

// Waits for something to do and handles the inbox. False at the end, after everything was aborted.
bool StepLoop::drain_inbox() {
  std::vector<std::unique_ptr<Sequence>> inbox;
  std::vector<std::string> cancelled_ids, released_ids;
  std::vector<KvEvent> events;
  bool aborting, stopping;
  Status failure;
  {
    std::unique_lock lock(mutex_);
    wait_for_input(lock);
    has_grammars_ = false;
    has_flushed_ = flush_wanted_;
    if (has_flushed_) scheduler_.flush();
    inbox.swap(inbox_);
    cancelled_ids.swap(cancelled_ids_);
    released_ids.swap(released_ids_);
    events.swap(events_);
    aborting = aborting_;
    stopping = stopping_;
    failure = failure_;
  }
  for (auto& sequence : inbox) {
    has_timeouts_ = has_timeouts_ || sequence->request.timeout_seconds > 0;
    compiling_.push_back(std::move(sequence));
    if (!compiling_.back()->disagg.prefill_node.empty()) ask_prefill_node(*compiling_.back());
  }
  for (KvEvent& event : events) take_event(std::move(event));
  enqueue_compiled(/*all=*/aborting || !failure.ok());
  for (const std::string& id : cancelled_ids)
    if (Sequence* sequence = find(id)) end(*sequence, {.finish_reason = FinishReason::kAbort});
  for (const std::string& id : released_ids)
    if (Sequence* sequence = find(id))
      end(*sequence,
          {.finish_reason = sequence->disagg.lease ? FinishReason::kLength : FinishReason::kAbort});
  if (!failure.ok())  // submitted before the failure was visible
    while (Sequence* sequence = scheduler_.first())
      end(*sequence, {.finish_reason = FinishReason::kError, .error = failure.message()});
  if (aborting)
    while (Sequence* sequence = scheduler_.first()) end(*sequence, {.finish_reason = FinishReason::kAbort});
  return !stopping;
}

// Requests that wait for another node, a grammar or a held prompt's release are checked for their time limits
// every kLookAgain.
void StepLoop::wait_for_input(std::unique_lock<std::mutex>& lock) {
  constexpr std::chrono::milliseconds kLookAgain(20);
  const auto has_work = [this] {
    return (scheduler_.first() && !is_stalled_) || !rows_.empty() || !inbox_.empty() ||
           !cancelled_ids_.empty() || !released_ids_.empty() || !events_.empty() || has_grammars_ ||
           (aborting_ && !(compiling_.empty() && scheduler_.first() == nullptr)) || flush_wanted_ ||
           stopping_;
  };
  if (scheduler_.first() == nullptr && compiling_.empty())
    inbox_changed_.wait(lock, has_work);
  else
    inbox_changed_.wait_for(lock, kLookAgain, has_work);
}

// Reads the clock only from time to time: the queue may be long.
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
  for (const auto& sequence : compiling_) listed_.push_back(sequence.get());
  for (Sequence* sequence : listed_) {
    const Status status = check_time(*sequence, limits, now);
    if (status.ok()) continue;
    ++totals_.num_timed_out_requests_total;
    fail(*find(sequence->id), status);
  }
}

// If the executor samples, the next step is enqueued before the tokens of the current one are taken.
void StepLoop::run_step() {
  const auto started = Clock::now();
  std::string error;
  try {
    ask_for_step();
  } catch (const std::exception& failure) {
    next_rows_.clear();
    error = failure.what();
  }
  if (!executor_.samples()) rows_.swap(next_rows_);
  try {
    watchdog_.enter("waiting for the sampled tokens");
    if (executor_.samples()) take_sampled();
  } catch (const std::exception& failure) {
    rows_.clear();
    error = failure.what();
  }
  watchdog_.enter("delivering the tokens");
  for (size_t r = 0; r < rows_.size();) {
    size_t end = r;  // of the rows that score one sequence
    while (end < rows_.size() && rows_[end].is_scored && rows_[end].sequence == rows_[r].sequence) ++end;
    if (end == r)
      accept(rows_[r++]);
    else
      take_scores(std::span(rows_).subspan(r, end - r));
    r = std::max(r, end);
  }
  rows_.clear();
  rows_.swap(next_rows_);
  if (!error.empty()) fail_step(error);
  step_duration_ = Clock::now() - started;
}

// Plans and starts the next step, if there is one; next_rows_ are its rows that score or choose a token.
void StepLoop::ask_for_step() {
  watchdog_.enter("planning");
  look_at_masks();
  const bool has_rows = scheduler_.plan_step();
  is_stalled_ = !has_rows && rows_.empty();
  if (decode_node_ != nullptr) take_all_pages();
  if (!has_rows) return;
  snapshot_.take(scheduler_);
  watchdog_.enter("the forward pass");
  if (const Status status = forward_rows(); !status.ok()) throw std::runtime_error(status.message());
  watchdog_.enter("sampling");
  take_masks();
  scheduler_.commit_step();
  if (executor_.samples())
    start_sample();
  else
    sample_rows();
  for (size_t r = 0; r < next_rows_.size(); ++r) {
    if (next_rows_[r].is_scored || next_rows_[r].sequence == nullptr) continue;
    next_rows_[r].sequence->token_ids.push_back(~static_cast<int32_t>(r));
    ++next_rows_[r].sequence->num_unknown;
  }
}

// Ends all running requests with the error; if no further step can run, waiting ones too.
void StepLoop::fail_step(const std::string& error) {
  const Status failure = executor_.failure();
  if (failure.ok()) {
    log_error("a step failed and ended all running requests: " + error);
    while (scheduler_.num_running() > 0)
      end(*scheduler_.first(), {.finish_reason = FinishReason::kError, .error = error});
    return;
  }
  {
    std::lock_guard lock(mutex_);
    failure_ = failure;
  }
  while (Sequence* sequence = scheduler_.first())
    end(*sequence, {.finish_reason = FinishReason::kError, .error = failure.message()});
}

// Runs the model over the step's rows. gather() has put the rows with logits into next_rows_.
Status StepLoop::forward_rows() {
  std::vector<Batch> batches;
  for (int group = 0; group < scheduler_.num_groups(); ++group) {
    GroupRows& rows = groups_[static_cast<size_t>(group)];
    gather(rows, scheduler_.step(group));
    make_room_for_experts(rows, scheduler_.step(group));
    batches.push_back({rows.token_ids, rows.positions, rows.sequences, rows.logit_rows,
                       rows.experts.empty() ? nullptr : rows.experts.data()});
  }
  FP4MOE_RETURN_IF_ERROR(executor_.execute_step(batches));
  for (int group = 0; group < scheduler_.num_groups(); ++group)
    keep_experts(groups_[static_cast<size_t>(group)], scheduler_.step(group));
  return {};
}

void StepLoop::gather(GroupRows& rows, std::span<const ScheduledRows> step) {
  rows.token_ids.clear();
  rows.positions.clear();
  rows.logit_rows.clear();
  rows.sequences.clear();
  for (const ScheduledRows& scheduled : step) {
    Sequence& sequence = *scheduled.sequence;
    if (sequence.times.started == Clock::time_point()) sequence.times.started = Clock::now();
    const int64_t first_row = static_cast<int64_t>(rows.token_ids.size()), first = sequence.kv.num_cached;
    rows.sequences.push_back({first_row, scheduled.num_rows, first, sequence.kv.page_table});
    for (int64_t position = first; position < first + scheduled.num_rows; ++position) {
      rows.token_ids.push_back(sequence.token_ids[static_cast<size_t>(position)]);
      rows.positions.push_back(position);
      if (!sequence.is_scored(position)) continue;
      rows.logit_rows.push_back(first_row + position - first);
      const int32_t scored_id = sequence.token_ids[static_cast<size_t>(position) + 1];
      next_rows_.push_back({&sequence, {.token_id = scored_id}, {}, /*is_scored=*/true});
      sequence.scores.next = position + 2;
    }
    if (!scheduled.reaches_end() || sequence.is_complete()) continue;
    rows.logit_rows.push_back(first_row + scheduled.num_rows - 1);
    next_rows_.push_back({&sequence, {}, {}, /*is_scored=*/false});
  }
}

void StepLoop::sample_rows() {
  const int64_t vocab_size = request_limits_.vocab_size;
  executor_.pool().run(static_cast<int64_t>(next_rows_.size()), [&](int64_t i, int) {
    SampledRow& row = next_rows_[static_cast<size_t>(i)];
    if (row.sequence == nullptr) return;
    const std::span<float> logits(executor_.logits() + i * vocab_size, static_cast<size_t>(vocab_size));
    const Sequence& sequence = *row.sequence;
    try {
      const double random = token_random(sequence.request.seed, sequence.num_tokens());
      std::vector<LogitEdit> edits;
      if (!row.is_scored)
        sequence.output.edits.append(sequence.num_tokens() - sequence.num_prompt_tokens, edits);
      Result<SampledToken> token =
          row.is_scored ? sampler_.score(logits, row.token.token_id, sequence.request.sampling.top_logprobs)
                        : sampler_.sample(logits, sequence.request.sampling, random, edits, row.allowed);
      row.status = token.status();
      if (token.ok()) row.token = std::move(*token);
    } catch (const std::exception& error) {  // out of memory; must not leave the worker
      row.status = internal_error(error.what());
    }
  });
}

void StepLoop::start_sample() {
  if (next_rows_.empty()) return;
  device_params_.clear();
  device_edits_.clear();
  device_allowed_.clear();
  for (const SampledRow& row : next_rows_) {
    if (row.sequence == nullptr) {  // the executor expects one entry per logit row of the step
      device_params_.push_back({});
      continue;
    }
    const Sequence& sequence = *row.sequence;
    const SamplingParams& sampling = sequence.request.sampling;
    const size_t first_edit = device_edits_.size();
    if (!row.is_scored)
      sequence.output.edits.append(sequence.num_tokens() - sequence.num_prompt_tokens, device_edits_);
    device_params_.push_back({.random = token_random(sequence.request.seed, sequence.num_tokens()),
                              .temperature = sampling.temperature,
                              .top_p = sampling.top_p,
                              .top_k = sampling.top_k,
                              .top_logprobs = sampling.top_logprobs,
                              .min_p = sampling.min_p,
                              .given_id = row.is_scored ? row.token.token_id : -1,
                              .first_edit = static_cast<int32_t>(first_edit),
                              .num_edits = static_cast<int32_t>(device_edits_.size() - first_edit),
                              .allowed = gather_allowed(row)});
  }
  if (const Status status = executor_.start_sample(device_params_, device_edits_, device_allowed_);
      !status.ok())
    throw std::runtime_error(status.message());
}

void StepLoop::take_sampled() {
  if (rows_.empty()) return;
  device_rows_.resize(rows_.size());
  if (const Status status = executor_.take_sampled(device_rows_); !status.ok())
    throw std::runtime_error(status.message());
  for (size_t i = 0; i < rows_.size(); ++i) {
    const fp4moe::SampledRow& sampled = device_rows_[i];
    if (sampled.status == SampleStatus::kBadLogits) rows_[i].status = bad_logits();
    if (sampled.status == SampleStatus::kNoToken) rows_[i].status = no_token();
    SampledToken& token = rows_[i].token;
    token = {.token_id = sampled.token_id, .logprob = sampled.logprob, .top = {}};
    for (int32_t k = 0; k < sampled.num_top; ++k)
      token.top.push_back({sampled.top_ids[k], sampled.top_logprobs[k], {}});
  }
}

PositionLogprobs StepLoop::logprobs_of(SampledToken& token) const {
  const auto bytes_of = [&](int32_t id) { return std::string(tokenizer_.token_bytes(id)); };
  for (TokenLogprob& top : token.top) top.bytes = bytes_of(top.token_id);
  return {{token.token_id, token.logprob, bytes_of(token.token_id)}, std::move(token.top)};
}

// Delivers the log-probabilities of a sequence's prompt tokens, and ends it if no output is requested.
void StepLoop::take_scores(std::span<SampledRow> rows) {
  if (rows[0].sequence == nullptr) return;
  Sequence& sequence = *rows[0].sequence;
  Delta delta;
  Status status;
  try {
    int64_t index = sequence.num_prompt_tokens - sequence.scores.num_due;  // of the scored token
    for (SampledRow& row : rows) {
      if (status.ok()) status = row.status;
      if (index++ >= sequence.scores.first_reported) delta.prompt_logprobs.push_back(logprobs_of(row.token));
    }
  } catch (const std::exception& error) {  // out of memory
    status = internal_error(error.what());
  }
  if (!status.ok()) return end(sequence, {.finish_reason = FinishReason::kError, .error = status.message()});
  sequence.scores.num_due -= std::ssize(rows);
  if (sequence.scores.num_due > 0 || sequence.max_tokens > sequence.num_prompt_tokens) {
    if (!delta.prompt_logprobs.empty()) deliver(sequence, delta);
    return;
  }
  count_prompt(sequence);
  delta.finish_reason = FinishReason::kLength;
  end(sequence, std::move(delta));
}

// Appends a row's token to its sequence and delivers the delta.
void StepLoop::accept(SampledRow& row) {
  if (row.sequence == nullptr) return;  // it ended while the step was in flight
  Sequence& sequence = *row.sequence;
  Delta delta;
  try {
    if (sequence.num_answer_tokens() == 0) count_prompt(sequence);
    if (sequence.disagg.on_held && row.status.ok()) return hold(row);
    if (row.status.ok()) delta = put_token(sequence, row.token);
    if (row.status.ok()) row.status = sequence.output.text.failure();
  } catch (const std::exception& error) {
    row.status = internal_error(error.what());
  }
  totals_.generation_tokens_total += std::ssize(delta.token_ids);
  if (!row.status.ok()) {
    delta.finish_reason = FinishReason::kError;
    delta.error = row.status.message();
    delta.error_code = row.status.code();
  }
  if (delta.finish_reason != FinishReason::kNone) return end(sequence, std::move(delta));
  if (sequence.grammar.matcher != nullptr) advance_grammar(sequence, row.token.token_id);
  deliver(sequence, delta);
}

void StepLoop::count_prompt(const Sequence& sequence) {
  ++totals_.num_prompts_total;
  totals_.prompt_tokens_total += sequence.num_prompt_tokens;
  totals_.cached_tokens_total += sequence.kv.num_reused;
}

void StepLoop::deliver(const Sequence& sequence, Delta& delta) {
  delta.prompt_tokens = sequence.num_prompt_tokens;
  delta.cached_tokens = std::max<int64_t>(sequence.kv.num_reused, 0);
  delta.completion_tokens = sequence.num_answer_tokens();
  sequence.output.sink->send(delta);
}

Delta StepLoop::put_token(Sequence& sequence, SampledToken& token) const {
  const SamplingParams& sampling = sequence.request.sampling;
  const int32_t id = token.token_id;
  sequence.token_ids[static_cast<size_t>(sequence.num_known_tokens())] = id;
  --sequence.num_unknown;
  sequence.output.edits.count(id);

  Delta delta{.token_ids = {id}};
  if (sampling.top_logprobs >= 0) delta.logprobs.push_back(logprobs_of(token));
  const bool may_end = !sampling.ignore_eos || sequence.grammar.matcher != nullptr;
  const bool is_end = may_end && contains(executor_.config().eos_token_ids, id);
  if (is_end || contains(sampling.stop_token_ids, id)) delta.matched_stop_token = id;
  const bool may_stop = sequence.num_answer_tokens() >= sampling.min_new_tokens;
  if (delta.matched_stop_token < 0 || sampling.no_stop_trim)
    delta.text = sequence.output.text.push(id, may_stop);
  // Without end tokens only the grammar knows whether the text ends here: look_at_masks() decides later.
  const bool grammar_decides =
      sequence.grammar.matcher != nullptr && executor_.config().eos_token_ids.empty();
  if (delta.matched_stop_token >= 0 || sequence.output.text.is_stopped())
    delta.finish_reason = FinishReason::kStop;
  else if (sequence.num_known_tokens() == sequence.max_tokens && !grammar_decides)
    delta.finish_reason = FinishReason::kLength;
  return delta;
}

// Delivers the last delta with the remaining text, and deletes the sequence.
void StepLoop::end(Sequence& sequence, Delta delta) {
  const bool failed =
      delta.finish_reason == FinishReason::kError && delta.error_code == StatusCode::kInternal;
  delta.routed_experts = take_experts(sequence);
  leave_grammar(sequence);
  const std::unique_ptr<Sequence> owned = scheduler_.remove(sequence.id, failed);
  FP4MOE_CHECK(owned != nullptr, "sequence " + sequence.id + " is not scheduled");
  delta.text += sequence.output.text.finish();
  if (delta.finish_reason == FinishReason::kAbort) ++totals_.num_aborted_requests_total;
  if (delta.finish_reason == FinishReason::kError) ++totals_.num_failed_requests_total;
  ++totals_.num_requests_total;
  if (const std::string& stop = sequence.output.text.matched_stop(); sequence.output.text.is_stopped()) {
    delta.finish_reason = FinishReason::kStop;
    delta.matched_stop = stop;
    if (sequence.request.sampling.no_stop_trim) delta.text += stop;
  }
  release_id(sequence.id);
  leave_room(sequence);
  deliver(sequence, delta);
  for (std::vector<SampledRow>* rows : {&rows_, &next_rows_})
    for (SampledRow& row : *rows)
      if (row.sequence == &sequence) row.sequence = nullptr;
}

}  // namespace fp4moe
