// The step loop's interface to other threads.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/printable.h"
#include "engine/step/step_loop.h"

namespace fp4moe {
namespace {

constexpr std::chrono::seconds kThroughputWindow{5};

double seconds(std::chrono::duration<double> duration) { return duration.count(); }

// Key by which the queue is ordered, largest first.
int64_t queue_priority(std::optional<int64_t> asked, const PriorityRules& rules) {
  if (!rules.are_used) return 0;
  if (!asked) return std::numeric_limits<int64_t>::min();
  return rules.low_first ? -*asked : *asked;
}

}  // namespace

std::unique_ptr<Sequence> StepLoop::make_sequence(Request request, StopPatterns patterns,
                                                  DeltaCallback on_delta, uint64_t ordinal) const {
  const SamplingParams& sampling = request.sampling;
  const int64_t num_prompt_tokens = static_cast<int64_t>(request.input_ids.size());
  AnswerText text(tokenizer_, sampling.skip_special_tokens, sampling.stop, std::move(patterns));
  LogitEdits edits(sampling, executor_.config().eos_token_ids);
  const auto after = [&](int64_t from) {
    return from >= 0 ? std::min(from + 1, num_prompt_tokens) : num_prompt_tokens;
  };
  const int64_t first_told_score = after(request.prompt_logprobs_from);
  const int64_t next_scored = std::min(first_told_score, after(request.routed_experts_from));
  return std::make_unique<Sequence>(Sequence{
      .id = std::move(request.id),
      .num_prompt_tokens = num_prompt_tokens,
      .max_tokens =
          num_prompt_tokens + std::min(sampling.max_new_tokens, options_.context_length - num_prompt_tokens),
      .token_ids = std::move(request.input_ids),
      .request = {.client = std::move(request.client),
                  .sampling = sampling,
                  .seed = sampling.seed.value_or(derived_seed(options_.random_seed, ordinal)),
                  .priority = queue_priority(request.priority, options_.priorities),
                  .timeout_seconds = request.timeout_seconds},
      .output = {.sink = std::make_shared<DeltaSink>(std::move(on_delta)),
                 .text = std::move(text),
                 .edits = std::move(edits)},
      .scores = {.next = next_scored,
                 .num_due = num_prompt_tokens - next_scored,
                 .first_reported = first_told_score},
      .experts = {.from = request.routed_experts_from},
      .disagg = {.prefill_node = std::move(request.prefill_node)},
      .times = {.submitted = Clock::now()},
  });
}

Result<std::string> StepLoop::submit(Request request, DeltaCallback on_delta) {
  return submit(std::move(request), std::move(on_delta), {});
}

Result<std::string> StepLoop::submit_prompt(Request request, std::function<void(HeldPrompt)> on_held,
                                            DeltaCallback on_end) {
  return submit(std::move(request), std::move(on_end), std::move(on_held));
}

Result<std::string> StepLoop::submit(Request request, DeltaCallback on_delta,
                                     std::function<void(HeldPrompt)> on_held) {
  FP4MOE_RETURN_IF_ERROR(check_request(request, request_limits_));
  if (!request.prefill_node.empty() && decode_node_ == nullptr)
    return unsupported("the request names prefill node " + printable(request.prefill_node) +
                       ", but this engine is not a decode node (--disaggregation-mode decode)");
  if (!request.prefill_node.empty()) FP4MOE_RETURN_IF_ERROR(decode_node_->check(request.prefill_node));
  GrammarTicket grammar;
  if (const GrammarSpec& spec = request.sampling.grammar; spec.kind != GrammarSpec::Kind::kNone) {
    if (grammars_ == nullptr)
      return unsupported(
          "the output must match a grammar, but this engine has no grammar backend "
          "(--grammar-backend none, or a build without xgrammar)");
    grammar = grammars_->ask(spec, request.client);
    if (grammar.is_ready()) FP4MOE_RETURN_IF_ERROR(grammar.get().status());
    if (request.prefill_node.empty())
      request.sampling.grammar.text = std::string();  // the store has its own
                                                      // copy
  }
  if (request.routed_experts_from >= 0)
    FP4MOE_RETURN_IF_ERROR(executor_.supports_routed_experts().with_context("return_routed_experts"));
  if (request.priority && !options_.priorities.are_used) FP4MOE_RETURN_IF_ERROR(ignore_priority());
  FP4MOE_ASSIGN_OR_RETURN(StopPatterns patterns, StopPatterns::compile(request.sampling.stop_regex));
  if (const Status failed = failure(); !failed.ok())
    return unavailable("the engine has failed: " + failed.message());
  std::lock_guard lock(mutex_);
  if (draining_) return unavailable("the engine is draining and takes no new requests");
  if (stats_.num_queue_reqs >= options_.max_queued_requests)
    return unavailable("the queue is full: " + std::to_string(stats_.num_queue_reqs) +
                       " requests wait, --max-queued-requests is " +
                       std::to_string(options_.max_queued_requests));
  const uint64_t ordinal = num_submitted_++;
  if (active_.contains(request.id))
    return invalid_argument("request id \"" + request.id + "\" is in use by a request that has not ended");
  while (request.id.empty() || active_.contains(request.id))
    request.id = "req-" + std::to_string(num_named_++);
  std::string id = request.id;
  inbox_.push_back(make_sequence(std::move(request), std::move(patterns), std::move(on_delta), ordinal));
  inbox_.back()->grammar.ticket = std::move(grammar);
  if (on_held) inbox_.back()->max_tokens = inbox_.back()->num_prompt_tokens + 1;
  inbox_.back()->disagg.on_held = std::move(on_held);
  active_.emplace(id, inbox_.back()->output.sink);
  ++stats_.num_queue_reqs;
  inbox_changed_.notify_one();
  return id;
}

// Warns once.
Status StepLoop::ignore_priority() {
  constexpr const char* kOff =
      "priority: requests are served in order of arrival, --enable-priority-scheduling is off";
  if (options_.priorities.refuse_unused) return unsupported(kOff);
  if (!warned_of_priority_.exchange(true)) log_warning(std::string(kOff) + "; the field is ignored");
  return {};
}

void StepLoop::cancel(const std::string& id) {
  std::lock_guard lock(mutex_);
  if (!active_.contains(id)) return;
  cancelled_ids_.push_back(id);
  inbox_changed_.notify_one();
}

void StepLoop::release_prompt(const std::string& id) {
  std::lock_guard lock(mutex_);
  if (!active_.contains(id)) return;
  released_ids_.push_back(id);
  inbox_changed_.notify_one();
}

Status StepLoop::flush_cache() {
  std::unique_lock lock(mutex_);
  if (!active_.empty())
    return unavailable("the cache cannot be flushed while " + std::to_string(active_.size()) +
                       " requests are running or waiting");
  if (stopping_) return {};
  flush_wanted_ = true;
  inbox_changed_.notify_one();
  idle_.wait(lock, [this] { return !flush_wanted_; });
  return {};
}

void StepLoop::drain(double timeout_seconds) {
  constexpr double kLongest = 1e8;  // seconds; keeps the conversion to clock ticks in range
  const std::chrono::duration<double> timeout(timeout_seconds > 0 ? std::min(timeout_seconds, kLongest) : 0);
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto is_idle = [this] { return (active_.empty() && num_ending_ == 0) || stuck_; };
  if (idle_.wait_for(lock, timeout, is_idle)) return;
  aborting_ = true;
  inbox_changed_.notify_one();
  idle_.wait(lock, is_idle);
}

Status StepLoop::failure() const {
  std::lock_guard lock(mutex_);
  return failure_.ok() ? executor_.failure() : failure_;
}

EngineStats StepLoop::stats() const {
  std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  const auto now = Clock::now();
  stats.uptime_seconds = seconds(now - started_);
  // Counts tokens since the last sample before the window, or since startup.
  const auto in_window = std::find_if(recent_.begin(), recent_.end(), [&](const TokensAt& sample) {
    return now - sample.time <= kThroughputWindow;
  });
  const int64_t before = in_window == recent_.begin() ? 0 : std::prev(in_window)->num_tokens;
  const double window = std::min(stats.uptime_seconds, seconds(kThroughputWindow));
  if (window > 0) stats.gen_throughput = static_cast<double>(stats.generation_tokens_total - before) / window;
  return stats;
}

// Makes the iteration's changes visible to other threads.
void StepLoop::publish() {
  totals_.num_running_reqs = scheduler_.num_running();
  totals_.num_queue_reqs = scheduler_.num_waiting() + std::ssize(compiling_);
  totals_.num_held_reqs = scheduler_.num_held();
  totals_.num_grammar_queue_reqs =
      std::ranges::count_if(
          compiling_,
          [](const auto& s) { return s->grammar.ticket.valid() && !s->grammar.ticket.is_ready(); }) +
      std::ranges::count_if(constrained_, [](const Sequence* s) { return s->grammar.awaits_mask; });
  count_awaited();
  totals_.num_retracted_reqs = scheduler_.num_retracted();
  totals_.new_token_ratio = scheduler_.new_token_ratio();
  totals_.num_pages = scheduler_.num_pages();
  totals_.num_free_pages = scheduler_.num_free_pages();
  totals_.num_cached_pages = scheduler_.num_cached_pages();
  totals_.num_used_pages = scheduler_.num_used_pages();
  totals_.num_leaked_pages = scheduler_.num_leaked_pages();
  totals_.num_used_tokens = totals_.num_used_pages * executor_.page_size();

  std::lock_guard lock(mutex_);
  if (totals_.generation_tokens_total != stats_.generation_tokens_total) {
    const auto now = Clock::now();
    while (recent_.size() > 1 && now - recent_[1].time > kThroughputWindow) recent_.pop_front();
    recent_.push_back({now, totals_.generation_tokens_total});
  }
  const int64_t num_new_prompt_tokens = totals_.prompt_tokens_total - stats_.prompt_tokens_total;
  if (num_new_prompt_tokens > 0)
    totals_.cache_hit_rate = static_cast<double>(totals_.cached_tokens_total - stats_.cached_tokens_total) /
                             static_cast<double>(num_new_prompt_tokens);
  stats_ = totals_;
  stats_.num_queue_reqs += static_cast<int64_t>(inbox_.size());
  num_ending_ = 0;
  if (has_flushed_) flush_wanted_ = false;
  if (std::exchange(has_flushed_, false) || active_.empty()) idle_.notify_all();
}

// The id is reusable as soon as the final delta is delivered; a pending cancel must not hit its new owner.
void StepLoop::release_id(const std::string& id) {
  std::lock_guard lock(mutex_);
  active_.erase(id);
  std::erase(cancelled_ids_, id);
  ++num_ending_;
}

// The loop's thread is stuck in a call: this thread ends its requests instead.
void StepLoop::on_stuck(const std::string& place) {
  char after[48];
  std::snprintf(after, sizeof after, " for %g s (--watchdog-timeout)", options_.watchdog_timeout);
  const Status failure = internal_error("the engine has been stuck in " + place + after);
  log_error(failure.message());
  for (const std::string& line : snapshot_.lines()) log_error("  " + line);
  std::vector<std::shared_ptr<DeltaSink>> sinks;
  {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    stuck_ = true;
    for (const auto& [id, sink] : active_) sinks.push_back(sink);
  }
  for (const auto& sink : sinks)
    static_cast<void>(sink->try_send({.finish_reason = FinishReason::kError, .error = failure.message()}));
  idle_.notify_all();
}

}  // namespace fp4moe
