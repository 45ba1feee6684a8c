// The step loop's sequences whose text must match a grammar. They wait outside of the scheduler until it is
// compiled.
#include <algorithm>
#include <exception>

#include "base/check.h"
#include "engine/step_loop.h"

namespace fp4moe {
namespace {

constexpr int kMaxMaskThreads = 8;

}  // namespace

void StepLoop::start_grammars(std::unique_ptr<GrammarCompiler> compiler) {
  grammars_ = std::make_unique<GrammarStore>(std::move(compiler), options_.grammars, [this] {
    std::lock_guard lock(mutex_);
    has_grammars_ = true;
    mail_.notify_one();
  });
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  masks_ = std::make_unique<MaskThreads>(std::clamp(cores / 4, 1, kMaxMaskThreads));
}

// Sequences whose grammar and first token are there, or that need none; or all, to be ended.
void StepLoop::enqueue_compiled(bool all) {
  for (auto& sequence : compiling_) {
    const bool has_grammar = !sequence->grammar.valid() || is_ready(sequence->grammar);
    const bool has_first_token = sequence->prefill_node.empty() || sequence->first_token.has_value();
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
  if (sequence.is_over() && !sequence.first_token)  // max_new_tokens = 0, and nothing wanted of the prompt
    return end(sequence, {.finish_reason = FinishReason::kLength});
  Status status = sequence.grammar.valid() ? sequence.grammar.get().status() : Status();
  try {
    if (status.ok() && sequence.grammar.valid()) {
      sequence.matcher = std::make_shared<AnswerGrammar>((*sequence.grammar.get())->make_matcher(),
                                                         request_limits_.vocab_size);
      masks_->fill_ahead(sequence.matcher);
    }
  } catch (const std::exception& error) {
    status = internal_error(std::string("the grammar: ") + error.what());
  }
  if (!status.ok())
    return end(
        sequence,
        {.finish_reason = FinishReason::kError, .error = status.message(), .error_code = status.code()});
  if (sequence.first_token) take_first_token(sequence);
}

// Null if there is none. One that waits for its grammar is taken from there: it is to be ended.
Sequence* StepLoop::find(const std::string& id) {
  const auto found =
      std::find_if(compiling_.begin(), compiling_.end(), [&](const auto& s) { return s->id == id; });
  if (found == compiling_.end()) return scheduler_.find(id);
  scheduler_.enqueue(std::move(*found));
  compiling_.erase(found);
  return scheduler_.find(id);
}

Status StepLoop::take_allowed(SampledRow& row) const {
  if (row.is_scored || row.sequence->matcher == nullptr) return {};
  FP4MOE_ASSIGN_OR_RETURN(row.allowed, row.sequence->matcher->allowed());
  return {};
}

// Appends the row's mask to device_allowed_ and returns its number; -1 if all ids are allowed. The executor's
// device computes the row's logits meanwhile.
int32_t StepLoop::gather_allowed(SampledRow& row) {
  row.status = take_allowed(row);
  if (row.allowed.empty()) return -1;
  const size_t num_masks = device_allowed_.size() / row.allowed.size();
  device_allowed_.insert(device_allowed_.end(), row.allowed.begin(), row.allowed.end());
  return static_cast<int32_t>(num_masks);
}

}  // namespace fp4moe
