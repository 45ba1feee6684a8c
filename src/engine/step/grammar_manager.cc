#include "engine/step/grammar_manager.h"

#include <algorithm>
#include <utility>

namespace fp4moe {
namespace {

// Longest time for which a step waits for its rows' masks after the forward pass. A step waits only a quarter
// of the previous iteration's time if that is less.
constexpr std::chrono::milliseconds kMaxMaskWait(2);

}  // namespace

GrammarManager::GrammarManager(std::unique_ptr<GrammarCompiler> compiler, const StepLoopOptions& options,
                               const Executor& executor, const std::function<void()>& on_ready)
    : vocab_size_(executor.config().vocab_size),
      executor_samples_(executor.samples()),
      store_(std::move(compiler), options.grammars, on_ready),
      masks_(options.masks, on_ready) {}

void GrammarManager::add(Sequence& sequence, std::shared_ptr<const Grammar> grammar) {
  sequence.grammar.matcher = std::make_shared<OutputGrammar>(std::move(grammar), vocab_size_);
  sequences_.push_back(&sequence);
}

void GrammarManager::advance(Sequence& sequence, int32_t id) {
  if (sequence.num_output_tokens() == 1 && sequence.disagg.first_token)
    masks_.start(sequence.grammar.matcher, id);
  else
    masks_.advance(sequence.grammar.matcher, id);
}

void GrammarManager::remove(Sequence& sequence) {
  if (sequence.grammar.matcher == nullptr) return;
  std::erase(sequences_, &sequence);
  sequence.grammar.awaits_mask = false;
  masks_.retire(std::exchange(sequence.grammar.matcher, nullptr));
}

std::optional<Delta> GrammarManager::check(Sequence& sequence) const {
  const OutputGrammar& matcher = *sequence.grammar.matcher;
  bool& awaits_mask = sequence.grammar.awaits_mask;
  switch (matcher.state()) {
    case OutputGrammar::State::kWorking:
      awaits_mask = awaits_mask || !expects_in_time(matcher);
      break;
    case OutputGrammar::State::kReady:
      awaits_mask = false;
      if (sequence.num_known_tokens() == sequence.max_tokens)
        return Delta{.finish_reason = FinishReason::kLength};
      break;
    case OutputGrammar::State::kEnded:
      return Delta{.finish_reason = FinishReason::kStop};
    case OutputGrammar::State::kFailed:
      return Delta{.finish_reason = FinishReason::kError,
                   .error = matcher.status().message(),
                   .error_code = matcher.status().code()};
  }
  return std::nullopt;
}

// Estimates this from the time that the last mask took. If the executor samples, masks are needed as soon as
// the step is enqueued.
bool GrammarManager::expects_in_time(const OutputGrammar& matcher) const {
  const Clock::duration time = executor_samples_ ? mask_wait() : step_duration_ + mask_wait();
  return !matcher.is_slow() && matcher.last_duration() <= time;
}

GrammarManager::Clock::duration GrammarManager::mask_wait() const {
  return std::min<Clock::duration>(kMaxMaskWait, step_duration_ / 4);
}

void GrammarManager::attach_masks(std::span<LogitRow> rows, DpScheduler& scheduler) {
  std::vector<OutputGrammar*> working;
  const auto needs_mask = [](const LogitRow& row) {
    return !row.is_scored && row.sequence->grammar.matcher != nullptr;
  };
  for (const LogitRow& row : rows)
    if (needs_mask(row) && row.sequence->grammar.matcher->state() == OutputGrammar::State::kWorking)
      working.push_back(row.sequence->grammar.matcher.get());
  if (!working.empty()) masks_.wait_for(working, Clock::now() + mask_wait());
  for (LogitRow& row : rows) {
    if (!needs_mask(row)) continue;
    if (row.sequence->grammar.matcher->state() == OutputGrammar::State::kReady) {
      row.allowed = row.sequence->grammar.matcher->allowed();
      continue;
    }
    scheduler.drop_last_row(*row.sequence);
    std::exchange(row.sequence, nullptr)->grammar.awaits_mask = true;
  }
}

int64_t GrammarManager::num_awaiting_masks() const {
  return std::ranges::count_if(sequences_, [](const Sequence* s) { return s->grammar.awaits_mask; });
}

}  // namespace fp4moe
