// The parts of a Sequence, one struct for each owner.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/disagg/kv_lease.h"
#include "engine/grammar/grammar_store.h"
#include "engine/grammar/output_grammar.h"
#include "engine/output/delta_sink.h"
#include "engine/output/logit_edits.h"
#include "engine/output/output_text.h"
#include "engine/schedule/draft_record.h"
#include "fp4moe/request.h"
#include "model/page_tables.h"

namespace fp4moe {

// Set at submission and constant afterwards.
struct SequenceRequest {
  std::string client;  // as in Request
  SamplingParams sampling;
  uint64_t seed = 0;
  int64_t priority = 0;        // larger values are admitted earlier
  double timeout_seconds = 0;  // from submission; 0: none
};

// Owned by the scheduler.
struct SequenceKv {
  int64_t num_cached = 0;           // number of leading token_ids whose keys and values are in the pages
  PageTables tables;                // cover num_cached and the rows of the current step
  int64_t num_published_pages = 0;  // number of leading pages of tables.full that the pool has published
  int64_t num_reused = -1;          // tokens found in cached pages when its first rows were scheduled; -1:
                                    // not yet scheduled
  int64_t num_rows = 0;             // number of rows in the step being planned
  int group = 0;                    // the data-parallel group that owns the pages
  // Of a model with states, while the sequence runs; otherwise 0. The slot has the state after
  // num_state_tokens() tokens, and the num_replayed tokens after them, which were drafts, in its replay rows.
  int32_t slot = 0;
  int32_t num_replayed = 0;
  bool is_ahead = false;            // the slot's state has one more token, whose row was dropped after it ran
  int64_t num_snapshot_tokens = 0;  // where the last snapshot was taken or read; 0: nowhere
  int64_t branch = 0;  // where the tokens leave a cached path that has no snapshot there; 0: nowhere

  int64_t num_state_tokens() const { return num_cached - num_replayed; }
};

// Speculative decoding: tokens that may follow the sequence's last token, valid for one step, and the numbers
// in Delta. The scheduler sets num_cached when it gives the sequence pages, and clears the state of a
// sequence whose pages it takes.
struct SequenceDraft {
  std::vector<int32_t> ids;  // negative: still on the device, as Executor::kFirstDraft says
  int64_t num_cached = 0;    // number of leading tokens whose draft keys and values are in the pages
  int64_t num_chained = 0;   // number of leading `ids` after them whose keys and values are there too
  // Drafts of the step that chooses the last token, if it is in flight and the executor accepts its drafts:
  // up to this number of tokens may turn out to be between that token and the known ones.
  int64_t num_in_flight = 0;
  int64_t most = std::numeric_limits<int64_t>::max();  // number of ids, if drafting them takes a model's time
  int64_t num_verified = 0, num_proposed = 0, num_correct = 0;
  std::vector<int64_t> num_steps;  // [n]: steps in which exactly n drafts were correct
  // Of the last step, until AdaptiveDrafter has added them to `record`.
  int64_t num_last_proposed = 0, num_last_correct = 0;
  DraftRecord record;
};

// The path from token ids to the client.
struct SequenceOutput {
  std::shared_ptr<DeltaSink> sink;
  OutputText text;
  LogitEdits edits;
};

// Log-probabilities of prompt tokens. Tokens from index `next` to `end` still need a row that scores them;
// num_due scores have not been taken yet.
struct SequenceScores {
  int64_t next = std::numeric_limits<int64_t>::max();
  int64_t end = 0;  // the number of prompt tokens, or one more if the request has no output and lists ids:
                    // then the prompt's last row scores them as candidates for the next token
  int64_t num_due = 0;
  int64_t first_reported = 0;  // first prompt token whose logprob is reported; earlier rows are computed only
                               // for routed experts
};

// Routed experts of the tokens from index `from` on; -1: not requested.
struct SequenceExperts {
  int64_t from = -1;
  std::vector<int32_t> ids;  // [tokens, layers, top_k]
};

// Owned by GrammarManager once the sequence is scheduled.
struct SequenceGrammar {
  GrammarTicket ticket;                    // valid while the sequence waits for its grammar
  std::shared_ptr<OutputGrammar> matcher;  // for the output so far, once the grammar is compiled; null: any
                                           // text is allowed
  std::vector<int32_t> chosen;             // output tokens that the matcher has not been given yet
  bool awaits_mask = false;                // no rows until its next token's mask is ready
};

// Disaggregation. Prefill engine: on_held is called when the prompt is held. Decode engine: the node that
// computes the prompt, the room, and the first token once received; the sequence awaits the prompt's pages
// from then on, or from when it has reserved pages.
struct SequenceDisagg {
  std::function<void(FirstToken)> on_held;
  std::string prefill_node;
  uint64_t room = 0;  // 0: not or no longer in a room
  std::optional<FirstToken> first_token;
  bool may_reserve = false;  // the next step may reserve pages for the prompt
  bool awaits_pages = false;
  // On the pages that are read or filled; the scheduler withdraws or ends it before it takes them back.
  // Prefill engine: from submission on.
  std::shared_ptr<KvLease> lease;
};

// Owned by the step loop, for its time limits.
struct SequenceTimes {
  using Clock = std::chrono::steady_clock;
  Clock::time_point submitted, started;  // started: when its first rows ran
  Clock::time_point held;                // when holding its pages began; default: they are not held
};

}  // namespace fp4moe
