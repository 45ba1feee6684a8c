// Sequence: the state of one request in the engine.
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

#include "engine/disagg/kv_lease.h"
#include "engine/grammar/answer_grammar.h"
#include "engine/grammar/grammar_store.h"
#include "engine/output/answer_text.h"
#include "engine/output/delta_sink.h"
#include "engine/output/logit_edits.h"
#include "fp4moe/request.h"

namespace fp4moe {

// A prefill engine's computed prompt; its pages are held until they are released.
struct HeldPrompt {
  FirstToken first;
  std::shared_ptr<KvLease> pages;
};

struct Sequence {
  std::string id;
  std::string client;  // as in Request
  SamplingParams sampling;
  std::shared_ptr<DeltaSink> sink;
  uint64_t seed = 0;
  AnswerText text;
  LogitEdits edits;
  GrammarTicket grammar;                   // valid while its grammar is being waited for
  std::shared_ptr<AnswerGrammar> matcher;  // of the output so far, once the grammar is compiled; null: any
                                           // text
  bool awaits_mask = false;                // no rows until its next token's mask is ready
  int64_t num_prompt_tokens = 0;
  int64_t max_tokens = 0;          // prompt and output together
  int64_t priority = 0;            // larger ones are admitted earlier
  std::vector<int32_t> token_ids;  // the prompt, then the output so far
  int64_t num_unknown = 0;         // tokens at the end that steps in flight will choose
  // Prompt tokens from next_scored on still need a row that scores them; num_scores_due scores are still to
  // be taken.
  int64_t next_scored = std::numeric_limits<int64_t>::max();
  int64_t num_scores_due = 0;
  int64_t first_told_score = 0;  // first prompt token whose logprob is reported; earlier rows are computed
                                 // only for routed experts
  // Routed experts of the tokens from experts_from on; -1: not requested.
  int64_t experts_from = -1;
  std::vector<int32_t> experts;  // [tokens, layers, top_k]

  // Owned by the scheduler.
  int64_t num_cached = 0;           // leading token_ids whose keys and values are in the pages
  std::vector<int32_t> page_table;  // covers num_cached and the rows of the current step
  int64_t num_published_pages = 0;  // leading pages of page_table that the pool has published
  int64_t num_reused = -1;          // tokens found in cached pages when its first rows were scheduled; -1:
                                    // not yet scheduled
  int64_t num_rows = 0;             // in the step being planned
  int group = 0;                    // the data-parallel group that owns the pages

  // Disaggregation. Prefill engine: on_held is called when the prompt is held. Decode engine: the node that
  // computes the prompt, the room, and the first token once received; from then on it awaits the prompt's
  // pages.
  std::function<void(HeldPrompt)> on_held;
  std::string prefill_node;
  uint64_t room = 0;  // 0: not or no longer in a room
  std::optional<FirstToken> first_token;
  bool awaits_pages = false;
  std::shared_ptr<KvLease> lease;  // on the pages while they are read or filled

  // Owned by the step loop.
  using Clock = std::chrono::steady_clock;
  double timeout_seconds = 0;            // from submission; 0: none
  Clock::time_point submitted, started;  // started: when its first rows ran
  Clock::time_point held;                // when its pages were held; default: they are not

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_known_tokens() const { return num_tokens() - num_unknown; }
  int64_t num_answer_tokens() const { return num_known_tokens() - num_prompt_tokens; }
  int64_t num_pending() const { return num_tokens() - num_cached; }
  bool is_complete() const { return num_tokens() == max_tokens; }
  // Whether the row at `position` scores the next prompt token.
  bool is_scored(int64_t position) const {
    return position + 1 >= next_scored && position + 1 < num_prompt_tokens;
  }
  int64_t num_logit_rows(int64_t count) const {
    const int64_t end = num_cached + count, scored_end = std::min(end, num_prompt_tokens - 1);
    const int64_t scored = std::max<int64_t>(0, scored_end - std::max(num_cached, next_scored - 1));
    return scored + (end == num_tokens() && !is_complete() ? 1 : 0);
  }
  // Whether it needs no more rows.
  bool is_over() const { return is_complete() && next_scored >= num_prompt_tokens; }
  // Whether choosing its next token requires the tokens still in flight.
  bool waits_for_token() const { return num_unknown > 0 && (edits.has_penalties() || matcher != nullptr); }
  bool has_started() const { return num_reused >= 0; }
  // Whether its mask may take long, so that other sequences may take its pages and its place.
  bool yields() const { return awaits_mask && matcher != nullptr && matcher->is_slow(); }
};

}  // namespace fp4moe
