#include "engine/grammar/output_grammar.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/thread_cpu.h"

namespace fp4moe {
namespace {

// At this nice value each slow-lane thread gets a tenth of a core when the engine's threads use all cores.
constexpr int kSlowLaneNice = 10;

}  // namespace

// ---- OutputGrammar --------------------------------------------------------------------------------

OutputGrammar::OutputGrammar(std::shared_ptr<const Grammar> grammar, int64_t vocab_size, int64_t max_drafts)
    : grammar_(std::move(grammar)),
      allowed_(static_cast<size_t>((vocab_size + 31) / 32)),
      allowed_ahead_(static_cast<size_t>(max_drafts)) {}

std::span<const uint32_t> OutputGrammar::allowed(int64_t depth) const {
  FP4MOE_CHECK(state() == State::kReady && depth <= num_ahead(), "the mask is not ready");
  return depth == 0 ? allowed_ : allowed_ahead_[static_cast<size_t>(depth) - 1];
}

void OutputGrammar::hand_over(std::span<const int32_t> ids) {
  set_drafts({});
  next_ids_.assign(ids.begin(), ids.end());
  handed_over_ = Clock::now();
  state_.store(State::kWorking, std::memory_order_release);
}

void OutputGrammar::set_drafts(std::span<const int32_t> drafts) {
  const size_t num_drafts = std::min(drafts.size(), allowed_ahead_.size());
  drafts_.assign(drafts.begin(), drafts.begin() + static_cast<std::ptrdiff_t>(num_drafts));
  ++num_changes_;
  num_ahead_.store(0, std::memory_order_release);
  is_looking_ahead_.store(!drafts_.empty(), std::memory_order_release);
}

// Drops the masks that are ready but come after other drafts.
void OutputGrammar::keep_masks_after(std::span<const int32_t> drafts) {
  drafts_.erase(std::ranges::mismatch(drafts_, drafts).in1, drafts_.end());
  num_ahead_.store(std::min<int64_t>(num_ahead(), std::ssize(drafts_)), std::memory_order_release);
}

// Keeps the masks that are ready.
void OutputGrammar::stop_looking() {
  drafts_.resize(static_cast<size_t>(num_ahead()));
  is_looking_ahead_.store(false, std::memory_order_release);
}

Status OutputGrammar::work(GrammarBudget budget) {
  budget.is_cancelled = &is_cancelled_;
  FP4MOE_RETURN_IF_ERROR(restore(budget));
  const auto num_kept = static_cast<std::ptrdiff_t>(roll_back_to(next_ids_));
  accepted_.insert(accepted_.end(), next_ids_.begin(), next_ids_.begin() + num_kept);
  next_ids_.erase(next_ids_.begin(), next_ids_.begin() + num_kept);
  ahead_.clear();
  for (; !next_ids_.empty(); next_ids_.erase(next_ids_.begin())) {
    FP4MOE_RETURN_IF_ERROR(matcher_->accept(next_ids_.front(), budget));
    accepted_.push_back(next_ids_.front());
  }
  return matcher_->has_ended() ? Status() : matcher_->fill_allowed(allowed_, budget);
}

// Fills the mask after all of `drafts`; those before the last one are allowed and have masks. has_mask: false
// if the last one is not allowed or nothing can follow it.
Status OutputGrammar::look(std::span<const int32_t> drafts, GrammarBudget budget, bool& has_mask) {
  budget.is_cancelled = &is_cancelled_;
  has_mask = false;
  const std::vector<uint32_t>& before = drafts.size() == 1 ? allowed_ : allowed_ahead_[drafts.size() - 2];
  if (!is_allowed(before, drafts.back())) return {};
  FP4MOE_RETURN_IF_ERROR(restore(budget));
  for (size_t i = roll_back_to(drafts); i < drafts.size(); ++i) {
    FP4MOE_RETURN_IF_ERROR(matcher_->accept(drafts[i], budget));
    ahead_.push_back(drafts[i]);
  }
  if (matcher_->has_ended()) return {};
  std::vector<uint32_t>& mask = allowed_ahead_[drafts.size() - 1];
  mask.resize(allowed_.size());
  FP4MOE_RETURN_IF_ERROR(matcher_->fill_allowed(mask, budget));
  has_mask = true;
  return {};
}

// After an error the matcher cannot be used: the next call creates a new one, which accepts the same tokens.
Status OutputGrammar::restore(const GrammarBudget& budget) {
  if (matcher_ != nullptr) return {};
  matcher_ = grammar_->make_matcher();
  for (const int32_t id : accepted_) FP4MOE_RETURN_IF_ERROR(matcher_->accept(id, budget));
  return {};
}

// Makes the matcher forget the drafts that differ from `ids`; returns the number of the others.
size_t OutputGrammar::roll_back_to(std::span<const int32_t> ids) {
  const auto num_kept = std::ranges::mismatch(ahead_, ids).in1 - ahead_.begin();
  if (num_kept < std::ssize(ahead_)) matcher_->rollback(std::ssize(ahead_) - num_kept);
  ahead_.resize(static_cast<size_t>(num_kept));
  return ahead_.size();
}

void OutputGrammar::restart() {
  matcher_.reset();
  ahead_.clear();
}

// ---- MaskThreads: the engine's side ---------------------------------------------------------------

MaskThreads::MaskThreads(const MaskLimits& limits, std::function<void()> on_done)
    : limits_(limits), on_done_(std::move(on_done)) {
  FP4MOE_CHECK(limits.num_fast_threads > 0 && limits.num_slow_threads > 0, "each lane needs a thread");
  slow_.is_slow = true;
  try {
    for (int i = 0; i < limits.num_fast_threads; ++i) add_thread(fast_);
    for (int i = 0; i < limits.num_slow_threads; ++i) add_thread(slow_);
  } catch (const std::exception&) {
    stop();
    throw;
  }
}

MaskThreads::~MaskThreads() { stop(); }

void MaskThreads::add_thread(Lane& lane) {
  threads_.emplace_back([this, &lane] { run(lane); });
}

void MaskThreads::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (OutputGrammar* output : running_) output->is_cancelled_.store(true, std::memory_order_relaxed);
  }
  for (Lane* lane : {&fast_, &slow_}) lane->changed.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MaskThreads::start(const OutputPtr& output, std::optional<int32_t> first_id) {
  std::lock_guard lock(mutex_);
  output->hand_over(first_id ? std::span<const int32_t>(&*first_id, 1) : std::span<const int32_t>());
  if (slow_grammars_.contains(output->grammar_)) output->is_slow_.store(true, std::memory_order_relaxed);
  enqueue(output);
}

void MaskThreads::advance(const OutputPtr& output, std::span<const int32_t> ids) {
  FP4MOE_CHECK(output->state() == OutputGrammar::State::kReady, "a token arrived before its mask was ready");
  std::lock_guard lock(mutex_);
  output->hand_over(ids);
  enqueue(output);
}

void MaskThreads::look_ahead(const OutputPtr& output, std::span<const int32_t> drafts) {
  std::lock_guard lock(mutex_);
  const OutputGrammar::State state = output->state();
  if (state == OutputGrammar::State::kEnded || state == OutputGrammar::State::kFailed ||
      std::ranges::equal(output->drafts_, drafts))
    return;
  if (output->is_slow()) return output->keep_masks_after(drafts);
  output->set_drafts(drafts);
  enqueue(output);
}

void MaskThreads::retire(OutputPtr output) {
  output->is_cancelled_.store(true, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    std::erase(slow_.waiting, output);
    fast_.waiting.push_back(std::move(output));
  }
  fast_.changed.notify_one();
}

void MaskThreads::wait_for(std::span<OutputGrammar* const> outputs,
                           std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  done_.wait_until(lock, deadline, [&] {
    return std::ranges::none_of(outputs, [](const auto* output) { return output->is_wanted(); });
  });
}

// An output that is queued already is queued again when its call in progress ends.
void MaskThreads::enqueue(const OutputPtr& output) {
  if (output->is_queued_ || !output->is_wanted()) return;
  output->is_queued_ = true;
  Lane& lane = output->is_slow() ? slow_ : fast_;
  lane.waiting.push_back(output);
  lane.changed.notify_one();
}

// ---- the threads' side ----------------------------------------------------------------------------

void MaskThreads::run(Lane& lane) {
  if (lane.is_slow) ThreadCpu::current().lower_priority(kSlowLaneNice);
  for (;;) {
    std::unique_lock lock(mutex_);
    lane.changed.wait(lock, [&] { return stopping_ || !lane.waiting.empty(); });
    if (stopping_) return;
    OutputPtr output = std::move(lane.waiting.front());
    lane.waiting.pop_front();
    if (!output->is_cancelled()) {
      running_.push_back(output.get());
      const bool works = output->state() == OutputGrammar::State::kWorking;
      const uint64_t num_changes = output->num_changes_;
      std::vector<int32_t> drafts = output->drafts_;
      if (!works) drafts.resize(std::min(drafts.size(), static_cast<size_t>(output->num_ahead()) + 1));
      lock.unlock();
      if (works)
        work(lane, *output);
      else if (!drafts.empty())
        look(*output, drafts, num_changes);
      lock.lock();
      std::erase(running_, output.get());
      output->is_queued_ = false;
      if (!output->is_cancelled()) enqueue(output);
    }
    lock.unlock();
    output.reset();  // without the lock: destroying a matcher can take long
  }
}

// Fills the mask of the output's next token.
void MaskThreads::work(Lane& lane, OutputGrammar& output) {
  const int64_t steps_before = output.matcher_ != nullptr ? output.matcher_->num_steps() : 0;
  const int64_t max_steps =
      lane.is_slow ? limits_.max_steps : std::min(limits_.max_fast_steps, limits_.max_steps);
  Status status;
  try {
    status = output.work({.max_steps = max_steps, .max_bytes = limits_.max_bytes});
  } catch (const std::exception& error) {
    status = unavailable(std::string("the grammar's mask: ") + error.what());  // out of memory
  }
  const bool over_budget = status.code() == StatusCode::kInvalidArgument;
  if (lane.is_slow && status.ok()) count_cheap(output, output.matcher_->num_steps() - steps_before);
  if (!status.ok()) output.restart();
  if (output.is_cancelled()) return;
  if (!over_budget || lane.is_slow) return finish(output, std::move(status));
  demote(output);
}

// Fills the mask after `drafts`, the first ones of the output's drafts. An error ends the chain only: the
// output may never get there.
void MaskThreads::look(OutputGrammar& output, std::span<const int32_t> drafts, uint64_t num_changes) {
  bool has_mask = false;
  Status status;
  try {
    status = output.look(
        drafts,
        {.max_steps = std::min(limits_.max_fast_steps, limits_.max_steps), .max_bytes = limits_.max_bytes},
        has_mask);
  } catch (const std::exception& error) {  // out of memory
    status = unavailable(error.what());
  }
  if (!status.ok()) output.restart();
  if (status.code() == StatusCode::kInvalidArgument) demote(output);
  {
    std::lock_guard lock(mutex_);
    if (output.num_changes_ == num_changes) {
      if (has_mask) output.num_ahead_.store(std::ssize(drafts), std::memory_order_release);
      if (!has_mask || drafts.size() == output.drafts_.size()) output.stop_looking();
    }
  }
  done_.notify_all();
}

void MaskThreads::demote(OutputGrammar& output) {
  std::lock_guard lock(mutex_);
  std::erase_if(slow_grammars_, [](const auto& entry) { return entry.first.expired(); });
  slow_grammars_[output.grammar_] = true;
  output.stop_looking();
  output.num_cheap_ = 0;
  output.is_slow_.store(true, std::memory_order_relaxed);
}

void MaskThreads::count_cheap(OutputGrammar& output, int64_t num_steps) const {
  output.num_cheap_ = num_steps <= limits_.max_fast_steps ? output.num_cheap_ + 1 : 0;
  if (output.num_cheap_ < kPromoteAfter) return;
  output.num_cheap_ = 0;
  output.is_slow_.store(false, std::memory_order_relaxed);
}

void MaskThreads::finish(OutputGrammar& output, Status status) {
  using State = OutputGrammar::State;
  output.last_duration_.store(OutputGrammar::Clock::now() - output.handed_over_, std::memory_order_relaxed);
  const bool failed = !status.ok();
  output.status_ = std::move(status);
  const State state = failed ? State::kFailed : output.matcher_->has_ended() ? State::kEnded : State::kReady;
  {
    std::lock_guard lock(mutex_);
    if (state != State::kReady) output.stop_looking();
    output.state_.store(state, std::memory_order_release);
  }
  done_.notify_all();
  on_done_();
}

}  // namespace fp4moe
