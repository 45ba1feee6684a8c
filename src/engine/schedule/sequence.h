// Sequence: the state of one request in the engine.
//
//   RequestIntake::submit
//      |
//   in the inbox
//      | StepLoop::drain_inbox
//   pending: waits for its grammar or for a prefill node's first token; may have reserved pages for the
//      |     prompt (DpScheduler::reserve), with which it skips the queue
//      | StepLoop::schedule_ready
//   queued <------------------+
//      | Scheduler::admit     | Scheduler::retract: gives its pages back
//   running ------------------+
//      | Scheduler::hold: a prefill node has computed the prompt
//   held: keeps its pages until the decode node releases them
//
// Delivery::end removes a sequence in any state except the inbox, gives its pages back, delivers its last
// delta and deletes it; StepLoop::find first queues a pending sequence, so that the scheduler has it.
//
// A running sequence gets rows in a step unless it waits for one of these:
//
//   a token in flight      waits_for_token()    until Delivery::accept knows the token
//   the prompt's pages     disagg.awaits_pages  until RemotePrefill::start_decoding
//   its next token's mask  grammar.awaits_mask  until GrammarManager::check finds it ready (parked)
//   its last token         is_over()            until that token is known
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/schedule/sequence_parts.h"

namespace fp4moe {

struct Sequence {
  using Clock = SequenceTimes::Clock;

  std::string id;
  int64_t num_prompt_tokens = 0;
  int64_t max_tokens = 0;          // prompt and output together
  std::vector<int32_t> token_ids;  // the prompt, then the output so far
  int64_t num_unknown = 0;         // number of tokens at the end that steps in flight will choose
  bool awaits_idle_task = false;   // submitted after the inbox's idle task, and scheduled after its end

  SequenceRequest request;
  SequenceKv kv;
  SequenceDraft draft;
  SequenceOutput output;
  SequenceScores scores;
  SequenceExperts experts;
  SequenceGrammar grammar;
  SequenceDisagg disagg;
  SequenceTimes times;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_known_tokens() const { return num_tokens() - num_unknown; }
  int64_t num_output_tokens() const { return num_known_tokens() - num_prompt_tokens; }
  // The number of tokens if all drafts in flight are right.
  int64_t num_tokens_at_most() const { return num_tokens() + draft.num_in_flight; }
  int64_t num_pending() const { return num_tokens() - kv.num_cached; }
  bool is_complete() const { return num_tokens() == max_tokens; }
  // Returns whether the row at `position` scores the token after it.
  bool is_scored(int64_t position) const { return position + 1 >= scores.next && position + 1 < scores.end; }
  // Returns the number of logit rows among the next `count` rows.
  int64_t num_logit_rows(int64_t count) const {
    const int64_t end = kv.num_cached + count, scored_end = std::min(end, scores.end - 1);
    const int64_t scored = std::max<int64_t>(0, scored_end - std::max(kv.num_cached, scores.next - 1));
    return scored + (end == num_tokens() && !is_complete() ? 1 : 0);
  }
  // Returns whether the sequence needs no more rows.
  bool is_over() const { return is_complete() && scores.next >= scores.end; }
  // Returns whether choosing the next token requires the tokens still in flight, or they may be the last
  // ones.
  bool waits_for_token() const {
    return num_unknown > 0 && (output.edits.has_penalties() || grammar.matcher != nullptr ||
                               (draft.num_in_flight > 0 && num_tokens_at_most() >= max_tokens));
  }
  // Returns whether a row can choose a token although the host knows neither the tokens before it nor their
  // number.
  bool allows_unknown_drafts() const {
    return !output.edits.has_penalties() && grammar.matcher == nullptr &&
           num_output_tokens() >= request.sampling.min_new_tokens && experts.from < 0 && !disagg.on_held;
  }
  // Returns whether the sequence can get rows now: it needs more and does not wait for a token, pages or a
  // mask.
  bool wants_rows() const {
    return !is_over() && !waits_for_token() && !disagg.awaits_pages && !grammar.awaits_mask;
  }
  bool has_started() const { return kv.num_reused >= 0; }
  // Returns whether the mask may take long, so that other sequences may take this one's pages and place.
  bool yields() const {
    return grammar.awaits_mask && grammar.matcher != nullptr && grammar.matcher->is_slow();
  }
};

}  // namespace fp4moe
