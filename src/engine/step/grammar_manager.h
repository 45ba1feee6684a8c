// GrammarManager: the step loop's part for sequences whose text must match a grammar: compiles grammars and
// fills masks on other threads, and decides which sequences get rows meanwhile.
//
// A mask is filled while the model computes. Before a step is planned, check() parks a sequence (awaits_mask)
// whose mask is not expected in time; after the forward pass, attach_masks() waits briefly for the masks of
// the other sequences. If a row's mask is late even then, the row chooses no token: its sequence is parked
// until the mask is ready, computes the same row again, and so chooses the same token. A row after drafts is
// dropped if its mask is late or the grammar refuses one of these drafts; drafts do not advance the grammar.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/grammar/grammar_store.h"
#include "engine/grammar/output_grammar.h"
#include "engine/ranks/executor.h"
#include "engine/schedule/dp_scheduler.h"
#include "engine/step/step_loop_options.h"
#include "engine/step/step_rows.h"

namespace fp4moe {

// Used by the loop's thread only, except compile().
class GrammarManager {
 public:
  // on_ready is called on other threads whenever a grammar or a mask becomes ready. Throws std::system_error
  // if the system cannot create a thread.
  GrammarManager(std::unique_ptr<GrammarCompiler> compiler, const StepLoopOptions& options,
                 const Executor& executor, const std::function<void()>& on_ready);

  // Callable from any thread; works like GrammarStore::ask().
  GrammarTicket compile(const GrammarSpec& spec, const std::string& client) {
    return store_.ask(spec, client);
  }

  // Constrains the sequence's text. Call start() next, or advance() after a token chosen elsewhere, to fill
  // the first mask.
  void add(Sequence& sequence, std::shared_ptr<const Grammar> grammar);
  void start(Sequence& sequence) { masks_.start(sequence.grammar.matcher); }
  // Lets a mask thread accept grammar.chosen; until the thread is done, the sequence has no mask and gets no
  // further token.
  void advance(Sequence& sequence);
  void remove(Sequence& sequence);  // ignores a sequence without a grammar
  const std::vector<Sequence*>& sequences() const { return sequences_; }

  // Before a step is planned: decides whether the sequence may get rows. Returns the last delta of a sequence
  // whose grammar has ended or failed.
  std::optional<Delta> check(Sequence& sequence) const;
  // Before a step is planned: removes drafts that the grammar is known to refuse.
  void drop_drafts() const;
  // Before the forward pass: lets mask threads fill the masks after the step's drafts.
  void look_ahead(const DpScheduler& scheduler);
  // After the forward pass: attaches masks to the rows that choose tokens. A row without a mask loses its
  // sequence.
  void attach_masks(std::span<LogitRow> rows, DpScheduler& scheduler);
  // Sets the duration of the last iteration, not counting the wait for input.
  void set_step_duration(std::chrono::steady_clock::duration duration) { step_duration_ = duration; }
  int64_t num_awaiting_masks() const;

 private:
  using Clock = std::chrono::steady_clock;
  bool expects_in_time(const OutputGrammar& matcher) const;
  Clock::duration mask_wait() const;

  const int64_t vocab_size_, max_drafts_;
  const bool executor_samples_;
  std::vector<Sequence*> sequences_;  // those with a matcher
  Clock::duration step_duration_{0};
  GrammarStore store_;
  MaskThreads masks_;  // destroyed before store_; their threads and the store's call on_ready
};

}  // namespace fp4moe
