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
      max_drafts_(options.max_drafts()),
      executor_samples_(executor.samples()),
      store_(std::move(compiler), options.grammars, on_ready),
      masks_(options.masks, on_ready) {}

void GrammarManager::add(Sequence& sequence, std::shared_ptr<const Grammar> grammar) {
  sequence.grammar.matcher = std::make_shared<OutputGrammar>(std::move(grammar), vocab_size_, max_drafts_);
  sequences_.push_back(&sequence);
}

void GrammarManager::advance(Sequence& sequence) {
  std::vector<int32_t>& chosen = sequence.grammar.chosen;
  if (sequence.num_output_tokens() == 1 && sequence.disagg.first_token)
    masks_.start(sequence.grammar.matcher, chosen.front());
  else
    masks_.advance(sequence.grammar.matcher, chosen);
  chosen.clear();
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

void GrammarManager::drop_drafts() const {
  for (Sequence* sequence : sequences_) {
    const OutputGrammar& matcher = *sequence->grammar.matcher;
    SequenceDraft& draft = sequence->draft;
    if (draft.ids.empty() || matcher.state() != OutputGrammar::State::kReady ||
        is_allowed(matcher.allowed(), draft.ids.front()))
      continue;
    draft.ids.clear();
    draft.num_chained = 0;
  }
}

void GrammarManager::look_ahead(const DpScheduler& scheduler) {
  for (int group = 0; group < scheduler.num_groups(); ++group)
    for (const ScheduledRows& rows : scheduler.step(group))
      if (rows.num_drafts > 0 && rows.sequence->grammar.matcher != nullptr)
        masks_.look_ahead(rows.sequence->grammar.matcher,
                          std::span(rows.sequence->draft.ids).first(static_cast<size_t>(rows.num_drafts)));
}

void GrammarManager::attach_masks(std::span<LogitRow> rows, DpScheduler& scheduler) {
  std::vector<OutputGrammar*> outputs;
  const auto needs_mask = [](const LogitRow& row) {
    return !row.is_scored && row.sequence->grammar.matcher != nullptr;
  };
  for (const LogitRow& row : rows)
    if (needs_mask(row) && row.depth == 0) outputs.push_back(row.sequence->grammar.matcher.get());
  if (!outputs.empty()) masks_.wait_for(outputs, Clock::now() + mask_wait());
  bool is_ready = false;  // whether the masks of the sequence's rows up to num_ahead are ready
  int64_t num_ahead = 0;
  for (LogitRow& row : rows) {
    if (!needs_mask(row)) continue;
    const OutputGrammar& matcher = *row.sequence->grammar.matcher;
    if (row.depth == 0) {
      is_ready = matcher.state() == OutputGrammar::State::kReady;
      const bool is_late = matcher.is_looking_ahead();
      num_ahead = matcher.num_ahead();
      if (is_late) row.num_drafts = std::min(row.num_drafts, num_ahead);
    }
    if (is_ready && row.depth <= num_ahead) {
      row.allowed = matcher.allowed(row.depth);
      continue;
    }
    Sequence& sequence = *std::exchange(row.sequence, nullptr);
    if (row.depth > 0) continue;
    scheduler.drop_last_row(sequence);
    sequence.grammar.awaits_mask = true;
  }
}

int64_t GrammarManager::num_awaiting_masks() const {
  return std::ranges::count_if(sequences_, [](const Sequence* s) { return s->grammar.awaits_mask; });
}

}  // namespace fp4moe
