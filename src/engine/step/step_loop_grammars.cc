// The step loop's part for sequences whose text must match a grammar. They wait outside the scheduler until
// it is compiled.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/step/step_loop.h"

namespace fp4moe {
namespace {

// Longest time that a step waits for its rows' masks after the forward pass, or a quarter of the previous
// iteration's time if that is less.
constexpr std::chrono::milliseconds kMaxMaskWait(2);

}  // namespace

void StepLoop::start_grammars(std::unique_ptr<GrammarCompiler> compiler) {
  grammars_ = std::make_unique<GrammarStore>(std::move(compiler), options_.grammars, [this] { wake(); });
  masks_ = std::make_unique<MaskThreads>(options_.masks, [this] { wake(); });
}

// A grammar or a mask has become ready.
void StepLoop::wake() {
  std::lock_guard lock(mutex_);
  has_grammars_ = true;
  inbox_changed_.notify_one();
}

// Schedules sequences whose grammar and first token are ready or not needed; or all of them, to be ended.
void StepLoop::enqueue_compiled(bool all) {
  for (auto& sequence : compiling_) {
    const bool has_grammar = !sequence->grammar.ticket.valid() || sequence->grammar.ticket.is_ready();
    const bool has_first_token =
        sequence->disagg.prefill_node.empty() || sequence->disagg.first_token.has_value();
    if (all)
      scheduler_.enqueue(std::move(sequence));
    else if (has_grammar && has_first_token)
      enqueue(std::move(sequence));
  }
  std::erase(compiling_, nullptr);
}

void StepLoop::enqueue(std::unique_ptr<Sequence> owned) {
  Sequence& sequence = *owned;
  scheduler_.enqueue(std::move(owned));
  if (sequence.is_over() &&
      !sequence.disagg.first_token)  // max_new_tokens = 0 and no prompt output requested
    return end(sequence, {.finish_reason = FinishReason::kLength});
  if (const GrammarTicket ticket = std::exchange(sequence.grammar.ticket, {}); ticket.valid()) {
    const GrammarResult& grammar = ticket.get();
    if (!grammar.ok()) return fail(sequence, grammar.status());
    if (sequence.max_tokens > sequence.num_prompt_tokens) {  // otherwise no token is chosen
      sequence.grammar.matcher = std::make_shared<AnswerGrammar>(*grammar, request_limits_.vocab_size);
      constrained_.push_back(&sequence);
    }
  }
  if (sequence.disagg.first_token)
    take_first_token(sequence);
  else if (sequence.grammar.matcher != nullptr)
    masks_->start(sequence.grammar.matcher);
}

void StepLoop::fail(Sequence& sequence, const Status& status) {
  end(sequence,
      {.finish_reason = FinishReason::kError, .error = status.message(), .error_code = status.code()});
}

// Null if not found. A sequence that waits for its grammar is moved to the scheduler, so that it can be
// ended.
Sequence* StepLoop::find(const std::string& id) {
  const auto found =
      std::find_if(compiling_.begin(), compiling_.end(), [&](const auto& s) { return s->id == id; });
  if (found == compiling_.end()) return scheduler_.find(id);
  scheduler_.enqueue(std::move(*found));
  compiling_.erase(found);
  return scheduler_.find(id);
}

// Before a step is planned: ends sequences whose grammar has ended or failed, and decides which other ones
// get rows. A sequence whose mask is still being filled gets its row if the mask is expected to be ready when
// needed: masks are then filled while the model computes and delay no step.
void StepLoop::look_at_masks() {
  const std::vector<Sequence*> constrained = constrained_;  // end() removes sequences
  for (Sequence* sequence : constrained) {
    const AnswerGrammar& matcher = *sequence->grammar.matcher;
    switch (matcher.state()) {
      case AnswerGrammar::State::kWorking:
        sequence->grammar.awaits_mask = sequence->grammar.awaits_mask || !expects_in_time(matcher);
        break;
      case AnswerGrammar::State::kReady:
        sequence->grammar.awaits_mask = false;
        if (sequence->num_known_tokens() == sequence->max_tokens)
          end(*sequence, {.finish_reason = FinishReason::kLength});
        break;
      case AnswerGrammar::State::kEnded:
        end(*sequence, {.finish_reason = FinishReason::kStop});
        break;
      case AnswerGrammar::State::kFailed:
        fail(*sequence, matcher.status());
        break;
    }
  }
}

// Estimated from its last mask. If the executor samples, masks are needed as soon as the step is enqueued.
bool StepLoop::expects_in_time(const AnswerGrammar& matcher) const {
  const Clock::duration time = executor_.samples() ? mask_wait() : step_duration_ + mask_wait();
  return !matcher.is_slow() && matcher.last_duration() <= time;
}

StepLoop::Clock::duration StepLoop::mask_wait() const {
  return std::min<Clock::duration>(kMaxMaskWait, step_duration_ / 4);
}

// Attaches masks to the rows that choose tokens. A row whose mask is late chooses none: its sequence gets no
// rows until the mask is ready, then computes the same row again, and so chooses the same token.
void StepLoop::take_masks() {
  std::vector<AnswerGrammar*> working;
  const auto needs_mask = [](const SampledRow& row) {
    return !row.is_scored && row.sequence->grammar.matcher != nullptr;
  };
  for (const SampledRow& row : next_rows_)
    if (needs_mask(row) && row.sequence->grammar.matcher->state() == AnswerGrammar::State::kWorking)
      working.push_back(row.sequence->grammar.matcher.get());
  if (!working.empty()) masks_->wait_for(working, Clock::now() + mask_wait());
  for (SampledRow& row : next_rows_) {
    if (!needs_mask(row)) continue;
    if (row.sequence->grammar.matcher->state() == AnswerGrammar::State::kReady) {
      row.allowed = row.sequence->grammar.matcher->allowed();
      continue;
    }
    scheduler_.drop_last_row(*row.sequence);
    std::exchange(row.sequence, nullptr)->grammar.awaits_mask = true;
  }
}

// A mask thread accepts the chosen token; until it is done the sequence has no mask and gets no further
// token.
void StepLoop::advance_grammar(Sequence& sequence, int32_t id) {
  if (sequence.num_answer_tokens() == 1 && sequence.disagg.first_token)
    masks_->start(sequence.grammar.matcher, id);
  else
    masks_->advance(sequence.grammar.matcher, id);
}

void StepLoop::leave_grammar(Sequence& sequence) {
  if (sequence.grammar.matcher == nullptr) return;
  std::erase(constrained_, &sequence);
  sequence.grammar.awaits_mask = false;
  masks_->retire(std::exchange(sequence.grammar.matcher, nullptr));
}

// Appends the row's mask to device_allowed_ and returns its index; -1 if all ids are allowed.
int32_t StepLoop::gather_allowed(const SampledRow& row) {
  if (row.allowed.empty()) return -1;
  const size_t num_masks = device_allowed_.size() / row.allowed.size();
  device_allowed_.insert(device_allowed_.end(), row.allowed.begin(), row.allowed.end());
  return static_cast<int32_t>(num_masks);
}

}  // namespace fp4moe
