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

OutputGrammar::OutputGrammar(std::shared_ptr<const Grammar> grammar, int64_t vocab_size)
    : grammar_(std::move(grammar)), allowed_(static_cast<size_t>((vocab_size + 31) / 32)) {}

std::span<const uint32_t> OutputGrammar::allowed() const {
  FP4MOE_CHECK(state() == State::kReady, "the mask is not ready");
  return allowed_;
}

void OutputGrammar::hand_over(std::optional<int32_t> id) {
  next_id_ = id;
  handed_over_ = Clock::now();
  state_.store(State::kWorking, std::memory_order_release);
}

// After an error the matcher cannot be used: the next call creates a new one, which accepts the same tokens.
Status OutputGrammar::work(GrammarBudget budget) {
  budget.is_cancelled = &is_cancelled_;
  if (matcher_ == nullptr) {
    matcher_ = grammar_->make_matcher();
    for (const int32_t id : accepted_) FP4MOE_RETURN_IF_ERROR(matcher_->accept(id, budget));
  }
  if (next_id_) {
    FP4MOE_RETURN_IF_ERROR(matcher_->accept(*next_id_, budget));
    accepted_.push_back(*next_id_);
    next_id_.reset();
  }
  return matcher_->has_ended() ? Status() : matcher_->fill_allowed(allowed_, budget);
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
  output->hand_over(first_id);
  if (is_known_slow(*output)) output->is_slow_.store(true, std::memory_order_relaxed);
  enqueue(output);
}

void MaskThreads::advance(const OutputPtr& output, int32_t id) {
  FP4MOE_CHECK(output->state() == OutputGrammar::State::kReady, "a token arrived before its mask was ready");
  output->hand_over(id);
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
    return std::ranges::none_of(outputs,
                                [](const auto* a) { return a->state() == OutputGrammar::State::kWorking; });
  });
}

void MaskThreads::enqueue(const OutputPtr& output) {
  Lane& lane = output->is_slow() ? slow_ : fast_;
  {
    std::lock_guard lock(mutex_);
    lane.waiting.push_back(output);
  }
  lane.changed.notify_one();
}

bool MaskThreads::is_known_slow(const OutputGrammar& output) const {
  std::lock_guard lock(mutex_);
  return slow_grammars_.contains(output.grammar_);
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
    const bool is_wanted = !output->is_cancelled();
    if (is_wanted) running_.push_back(output.get());
    lock.unlock();
    if (is_wanted)
      work(lane, std::move(output));
    else
      output.reset();
  }
}

void MaskThreads::work(Lane& lane, OutputPtr output) {
  const int64_t steps_before = output->matcher_ != nullptr ? output->matcher_->num_steps() : 0;
  const int64_t max_steps =
      lane.is_slow ? limits_.max_steps : std::min(limits_.max_fast_steps, limits_.max_steps);
  Status status;
  try {
    status = output->work({.max_steps = max_steps, .max_bytes = limits_.max_bytes});
  } catch (const std::exception& error) {
    status = unavailable(std::string("the grammar's mask: ") + error.what());  // out of memory
  }
  const bool over_budget = status.code() == StatusCode::kInvalidArgument;
  if (lane.is_slow && status.ok()) count_cheap(*output, output->matcher_->num_steps() - steps_before);
  if (!status.ok()) output->restart();
  {
    std::lock_guard lock(mutex_);
    std::erase(running_, output.get());
  }
  if (output->is_cancelled()) return;
  if (!over_budget || lane.is_slow) return finish(*output, std::move(status));
  demote(*output);
  enqueue(output);
}

void MaskThreads::demote(OutputGrammar& output) {
  std::lock_guard lock(mutex_);
  std::erase_if(slow_grammars_, [](const auto& entry) { return entry.first.expired(); });
  slow_grammars_[output.grammar_] = true;
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
    output.state_.store(state, std::memory_order_release);
  }
  done_.notify_all();
  on_done_();
}

}  // namespace fp4moe
