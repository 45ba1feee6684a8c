// Sequence: one request on its way through the engine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/answer_grammar.h"
#include "engine/answer_text.h"
#include "engine/grammar_store.h"
#include "engine/kv_lease.h"
#include "engine/logit_edits.h"
#include "engine/outlet.h"
#include "fp4moe/request.h"

namespace fp4moe {

// A prompt of a prefill engine that was computed: its pages are held until they are released.
struct HeldPrompt {
  FirstToken first;
  std::shared_ptr<KvLease> pages;
};

struct Sequence {
  std::string id;
  std::string client;  // as Request's
  SamplingParams sampling;
  std::shared_ptr<Outlet> outlet;
  uint64_t seed = 0;
  AnswerText text;
  LogitEdits edits;
  GrammarTicket grammar;                   // valid while its grammar is waited for
  std::shared_ptr<AnswerGrammar> matcher;  // of the answer so far, once the grammar is there; null: any text
  bool awaits_mask = false;                // it gets no rows: the mask of its next token is not there
  int64_t num_prompt_tokens = 0;
  int64_t max_tokens = 0;          // prompt and answer together
  int64_t priority = 0;            // a larger one is admitted earlier
  std::vector<int32_t> token_ids;  // the prompt, then the answer so far
  int64_t num_unknown = 0;         // of them, at the end: steps under way choose them
  // The prompt's tokens from here on are scored by rows still to be asked for; so many scores are due.
  int64_t next_scored = std::numeric_limits<int64_t>::max();
  int64_t num_scores_due = 0;
  int64_t first_told_score = 0;  // the others are there for their rows' experts alone
  // Of the tokens from experts_from on the layers' experts, as they were computed; -1: not wanted.
  int64_t experts_from = -1;
  std::vector<int32_t> experts;  // [tokens, layers, top_k]

  // The scheduler's.
  int64_t num_cached = 0;           // the first token_ids, whose keys and values are in the pages
  std::vector<int32_t> page_table;  // covers num_cached and the rows of the current step
  int64_t num_known_pages = 0;      // of them, at the beginning: the pool knows their tokens
  int64_t num_reused = -1;          // tokens whose pages were there at its first rows; -1: before them
  int64_t num_rows = 0;             // in the step that is being planned
  int group = 0;                    // the data-parallel group whose pages these are

  // Disaggregation. Of a prefill engine: who is told when the prompt is held. Of a decode engine: who
  // computes it, in which room, its first token when that has come; the prompt's pages are awaited from then
  // on.
  std::function<void(HeldPrompt)> on_held;
  std::string prefill_node;
  uint64_t room = 0;  // 0: none any more
  std::optional<FirstToken> first_token;
  bool awaits_pages = false;
  std::shared_ptr<KvLease> lease;  // of the pages, while they are read or filled

  // The step loop's.
  using Clock = std::chrono::steady_clock;
  double timeout_seconds = 0;            // from submission on; 0: none
  Clock::time_point submitted, started;  // started: its first rows were
  Clock::time_point held;                // since then its pages wait to be released

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_known_tokens() const { return num_tokens() - num_unknown; }
  int64_t num_answer_tokens() const { return num_known_tokens() - num_prompt_tokens; }
  int64_t num_pending() const { return num_tokens() - num_cached; }
  bool is_complete() const { return num_tokens() == max_tokens; }
  // Of its next `count` rows, those whose logits are wanted: they score the prompt's next token, or choose
  // one.
  bool is_scored(int64_t position) const {
    return position + 1 >= next_scored && position + 1 < num_prompt_tokens;
  }
  int64_t num_logit_rows(int64_t count) const {
    const int64_t end = num_cached + count, scored_end = std::min(end, num_prompt_tokens - 1);
    const int64_t scored = std::max<int64_t>(0, scored_end - std::max(num_cached, next_scored - 1));
    return scored + (end == num_tokens() && !is_complete() ? 1 : 0);
  }
  // Whether there is no row to ask for any more.
  bool is_over() const { return is_complete() && next_scored >= num_prompt_tokens; }
  // Whether its next token cannot be chosen before the last one is known.
  bool waits_for_token() const { return num_unknown > 0 && (edits.has_penalties() || matcher != nullptr); }
  bool has_started() const { return num_reused >= 0; }
  // Whether it may be long before it can have a row: others may have its pages and its place meanwhile.
  bool yields() const { return awaits_mask && matcher != nullptr && matcher->is_slow(); }
};

}  // namespace fp4moe
