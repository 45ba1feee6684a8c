// Drafter: proposes tokens that may follow the sequences' last tokens (speculative decoding).
#pragma once

#include <cstdint>
#include <span>

#include "engine/schedule/dp_scheduler.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Used by the loop's thread only.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Called once per step, after the tokens of the step before have been delivered and before the next one is
  // planned. Sets draft.ids of sequences that decode; other sequences have none. Ids may stay on the device
  // if the host needs none before the step is sampled.
  virtual Status draft(DpScheduler& scheduler) = 0;
  // Called after the forward pass of a planned step and before it is committed.
  virtual void keep_step(const DpScheduler& /*scheduler*/) {}
  // Called when the sampling of the step's num_sampled rows of logits has been started, before their tokens
  // are known. A failure ends the running requests after these tokens have been delivered.
  virtual Status run_ahead(int64_t /*num_sampled*/) { return {}; }
  // Whether run_ahead() has computed all that draft_ahead() needs.
  virtual bool has_run_ahead() const { return false; }
  // Called instead of draft() if the executor accepts the drafts of the last step (Executor::accept_drafts())
  // and its tokens are not known: the ids and the rows of the next drafts depend on how many are right.
  virtual Status draft_ahead(DpScheduler& /*scheduler*/) {
    return internal_error("this drafter needs the tokens of the last step");
  }
  // Called after the step of the last keep_step() was planned and enqueued with the step before it in flight,
  // and that step's tokens have been delivered.
  virtual void settle_step() {}
  // Called when the step's tokens are known, `seconds` after its planning began.
  virtual void finish_step(double /*seconds*/) {}
  // Called before a scheduled sequence is removed and deleted.
  virtual void end(const Sequence& /*sequence*/) {}
  // Whether draft() runs a model. It should then set at most draft.most ids.
  virtual bool runs_model() const { return false; }
  // Makes the next draft() wait until its ids are known, so that its time is that of the model's passes.
  virtual void wait_in_next_draft() {}
  // Whether the last draft() has waited.
  virtual bool has_waited() const { return true; }
};

// Returns whether the sequence's next row chooses its next token, after the first one.
inline bool decodes(const Sequence& sequence) {
  return sequence.num_output_tokens() > 0 && sequence.num_pending() == 1;
}

// Returns whether the sequence's next step may verify drafts. A sequence whose masks are slow has none,
// because each draft needs another mask.
inline bool may_draft(const Sequence& sequence) {
  const OutputGrammar* grammar = sequence.grammar.matcher.get();
  return decodes(sequence) && (grammar == nullptr || !grammar->is_slow());
}

// The numbers of the sequences' drafts that stayed on the device (Executor::begin_drafts()).
struct KeptDrafts {
  int32_t first = 0, end = 0;  // empty if equal

  void add(const SequenceDraft& draft);
  size_t size() const { return static_cast<size_t>(end - first); }
};
// Replaces the numbers by ids; `ids` begins with that of number `first`. Drafts end at the first without an
// id.
void reveal_drafts(SequenceDraft& draft, int32_t first, std::span<const int32_t> ids);

}  // namespace fp4moe
