#include "engine/step/inbox.h"

#include <algorithm>
#include <utility>

namespace fp4moe {

Inbox::Inbox(const Executor& executor, int64_t max_queued_requests)
    : executor_(executor), max_queued_requests_(max_queued_requests) {}

// ---- any thread -----------------------------------------------------------------------------------

// No ticket may be destroyed while the mutex is held, because that locks the grammar store, whose threads
// call wake() with the store's lock held. So the queued sequence gets the ticket last.
Result<std::string> Inbox::submit(Request request, GrammarTicket& ticket, const MakeSequence& make) {
  std::lock_guard lock(mutex_);
  if (is_draining_) return unavailable("the engine is draining and accepts no new requests");
  if (stats_.num_queue_reqs >= max_queued_requests_)
    return unavailable("the queue is full: " + std::to_string(stats_.num_queue_reqs) +
                       " requests are waiting; --max-queued-requests is " +
                       std::to_string(max_queued_requests_));
  const uint64_t ordinal = num_submitted_++;
  if (active_.contains(request.id))
    return invalid_argument("request id \"" + request.id + "\" is in use by a request that has not ended");
  while (request.id.empty() || active_.contains(request.id))
    request.id = "req-" + std::to_string(num_named_++);
  std::string id = request.id;
  const auto& sequence = input_.sequences.emplace_back(make(std::move(request), ordinal));
  sequence->grammar.ticket = std::move(ticket);
  active_.emplace(id, sequence->output.sink);
  ++stats_.num_queue_reqs;
  changed_.notify_one();
  return id;
}

void Inbox::cancel(const std::string& id) {
  std::lock_guard lock(mutex_);
  if (!active_.contains(id)) return;
  input_.cancelled_ids.push_back(id);
  changed_.notify_one();
}

void Inbox::release(const std::string& id) {
  std::lock_guard lock(mutex_);
  if (!active_.contains(id)) return;
  input_.released_ids.push_back(id);
  changed_.notify_one();
}

Status Inbox::flush_cache() {
  std::unique_lock lock(mutex_);
  if (!active_.empty())
    return unavailable("the cache cannot be flushed while " + std::to_string(active_.size()) +
                       " requests are running or waiting");
  if (input_.stops) return {};
  input_.flushes = true;
  changed_.notify_one();
  idle_.wait(lock, [this] { return !input_.flushes; });
  return {};
}

Result<int64_t> Inbox::run_when_idle(std::function<Status()> run, bool aborts) {
  std::unique_lock lock(mutex_);
  if (is_draining_) return unavailable("the engine is draining");
  if (!input_.failure.ok()) return input_.failure;
  if (input_.idle_task != nullptr) return unavailable("another update has not ended");
  const auto task = std::make_shared<IdleTask>(IdleTask{.run = std::move(run), .aborts = aborts});
  input_.idle_task = task;
  changed_.notify_one();
  idle_.wait(lock, [&] { return task->status.has_value() || is_stuck_; });
  if (!task->status) return input_.failure;
  if (!task->status->ok()) return *task->status;
  return task->num_waited;
}

void Inbox::refuse_idle_task() {
  if (input_.idle_task == nullptr || input_.idle_task->has_started) return;
  input_.idle_task->status = unavailable("the engine is draining");
  input_.idle_task = nullptr;
  idle_.notify_all();
}

Result<ExpertMoves> Inbox::rebalance_experts() {
  std::unique_lock lock(mutex_);
  if (input_.stops || is_stuck_) return unavailable("the engine has stopped");
  input_.rebalances = true;
  const uint64_t num_ended = num_rebalances_;
  changed_.notify_one();
  idle_.wait(lock, [&] { return num_rebalances_ > num_ended || is_stuck_; });
  if (num_rebalances_ == num_ended) return input_.failure;
  return last_moves_;
}

void Inbox::drain(double timeout_seconds) {
  constexpr double kLongest = 1e8;  // seconds; keeps the conversion to clock ticks in range
  const std::chrono::duration<double> timeout(timeout_seconds > 0 ? std::min(timeout_seconds, kLongest) : 0);
  std::unique_lock lock(mutex_);
  is_draining_ = true;
  refuse_idle_task();
  const auto is_idle = [this] { return (active_.empty() && num_ending_ == 0) || is_stuck_; };
  if (idle_.wait_for(lock, timeout, is_idle)) return;
  input_.aborts = true;
  changed_.notify_one();
  idle_.wait(lock, is_idle);
}

EngineStats Inbox::stats() const {
  std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.is_updating_weights = input_.idle_task != nullptr && input_.idle_task->has_started;
  const auto now = Clock::now();
  stats.uptime_seconds = std::chrono::duration<double>(now - started_).count();
  stats.gen_throughput = throughput_.rate(now, stats.uptime_seconds, stats.generation_tokens_total);
  return stats;
}

Status Inbox::failure() const {
  std::lock_guard lock(mutex_);
  return input_.failure.ok() ? executor_.failure() : input_.failure;
}

void Inbox::add_event(KvEvent event) {
  std::lock_guard lock(mutex_);
  input_.events.push_back(std::move(event));
  changed_.notify_one();
}

void Inbox::wake() {
  std::lock_guard lock(mutex_);
  input_.has_grammar = true;
  changed_.notify_one();
}

void Inbox::stop() {
  {
    std::lock_guard lock(mutex_);
    is_draining_ = input_.aborts = input_.stops = true;
    refuse_idle_task();
  }
  changed_.notify_one();
}

// ---- the loop's thread ----------------------------------------------------------------------------

LoopInput Inbox::wait(bool can_step, bool has_requests) {
  constexpr std::chrono::milliseconds kLookAgain(20);
  std::unique_lock lock(mutex_);
  const auto is_ready = [&] { return can_step || has_input(has_requests); };
  if (has_requests)
    changed_.wait_for(lock, kLookAgain, is_ready);
  else
    changed_.wait(lock, is_ready);
  is_flushing_ = input_.flushes;
  LoopInput taken = std::exchange(input_, {});
  input_.flushes = taken.flushes;      // until publish()
  input_.idle_task = taken.idle_task;  // until end_idle_task()
  input_.failure = taken.failure;      // this and the next two are permanent
  input_.aborts = taken.aborts;
  input_.stops = taken.stops;
  return taken;
}

bool Inbox::start_idle_task() {
  std::lock_guard lock(mutex_);
  if (input_.idle_task == nullptr) return false;
  return input_.idle_task->has_started = true;
}

void Inbox::end_idle_task(const Status& status, int64_t num_waited) {
  std::lock_guard lock(mutex_);
  if (input_.idle_task == nullptr) return;
  input_.idle_task->status = status;
  input_.idle_task->num_waited = num_waited + std::ssize(input_.sequences);
  input_.idle_task = nullptr;
  idle_.notify_all();
}

bool Inbox::has_input(bool has_requests) const {
  return input_.flushes || input_.rebalances ||
         (input_.idle_task != nullptr && (!has_requests || !input_.idle_task->is_known)) ||
         !input_.sequences.empty() || !input_.events.empty() || input_.has_grammar ||
         !input_.cancelled_ids.empty() || !input_.released_ids.empty() || (input_.aborts && has_requests) ||
         input_.stops;
}

void Inbox::end_rebalance(const Result<ExpertMoves>& moves) {
  std::lock_guard lock(mutex_);
  last_moves_ = moves;
  ++num_rebalances_;
  idle_.notify_all();
}

void Inbox::fail(const Status& failure) {
  std::lock_guard lock(mutex_);
  input_.failure = failure;
}

void Inbox::release_id(const std::string& id) {
  std::lock_guard lock(mutex_);
  active_.erase(id);
  std::erase(input_.cancelled_ids, id);
  ++num_ending_;
}

void Inbox::publish(const EngineStats& totals) {
  std::lock_guard lock(mutex_);
  const EngineStats before = std::exchange(stats_, totals);
  if (stats_.generation_tokens_total != before.generation_tokens_total)
    throughput_.add(Clock::now(), stats_.generation_tokens_total);
  const int64_t num_new_prompt_tokens = stats_.prompt_tokens_total - before.prompt_tokens_total;
  stats_.cache_hit_rate = num_new_prompt_tokens > 0
                              ? static_cast<double>(stats_.cached_tokens_total - before.cached_tokens_total) /
                                    static_cast<double>(num_new_prompt_tokens)
                              : before.cache_hit_rate;
  stats_.num_queue_reqs += std::ssize(input_.sequences);
  num_ending_ = 0;
  if (is_flushing_) input_.flushes = false;
  if (std::exchange(is_flushing_, false) || active_.empty()) idle_.notify_all();
}

// ---- the watchdog's thread ------------------------------------------------------------------------

void Inbox::abandon(const Status& failure) {
  std::vector<std::shared_ptr<DeltaSink>> sinks;
  {
    std::lock_guard lock(mutex_);
    input_.failure = failure;
    is_stuck_ = true;
    for (const auto& [id, sink] : active_) sinks.push_back(sink);
  }
  for (const auto& sink : sinks)
    static_cast<void>(sink->try_send({.finish_reason = FinishReason::kError, .error = failure.message()}));
  idle_.notify_all();
}

}  // namespace fp4moe
