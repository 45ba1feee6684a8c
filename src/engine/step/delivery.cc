#include "engine/step/delivery.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

void Delivery::take_rows(std::span<LogitRow> rows) {
  for (size_t r = 0; r < rows.size();) {
    size_t end = r;  // end of the rows that score one sequence
    while (end < rows.size() && rows[end].is_scored && rows[end].sequence == rows[r].sequence) ++end;
    if (end > r)
      take_scores(rows.subspan(r, end - r));
    else
      accept(rows[r], ++end == rows.size() || rows[end].sequence != rows[r].sequence);
    r = end;
  }
}

// ---- prompt scores --------------------------------------------------------------------------------

// Delivers the log-probabilities of a sequence's prompt tokens, and ends it if no output is requested.
void Delivery::take_scores(std::span<LogitRow> rows) {
  if (rows[0].sequence == nullptr) return;
  Sequence& sequence = *rows[0].sequence;
  Delta delta;
  Status status;
  try {
    int64_t index = sequence.scores.end - sequence.scores.num_due;  // index of the scored token
    for (LogitRow& row : rows) {
      if (status.ok()) status = row.status;
      if (index == sequence.num_prompt_tokens)
        delta.logprobs.push_back(next_logprobs_of(row.token));
      else if (index >= sequence.scores.first_reported)
        delta.prompt_logprobs.push_back(logprobs_of(row.token));
      ++index;
    }
  } catch (const std::exception& error) {  // out of memory
    status = internal_error(error.what());
  }
  if (!status.ok()) return end(sequence, {.finish_reason = FinishReason::kError, .error = status.message()});
  sequence.scores.num_due -= std::ssize(rows);
  if (sequence.scores.num_due > 0 || sequence.max_tokens > sequence.num_prompt_tokens) {
    if (!delta.prompt_logprobs.empty()) deliver(sequence, delta);
    return;
  }
  count_prompt(sequence);
  delta.finish_reason = FinishReason::kLength;
  end(sequence, std::move(delta));
}

PositionLogprobs Delivery::logprobs_of(SampledToken& token) const {
  const auto bytes_of = [&](int32_t id) { return std::string(parts_.tokenizer.token_bytes(id)); };
  for (auto* const listed : {&token.top, &token.ids})
    for (TokenLogprob& entry : *listed) entry.bytes = bytes_of(entry.token_id);
  return {
      {token.token_id, token.logprob, bytes_of(token.token_id)}, std::move(token.top), std::move(token.ids)};
}

// For a prompt without output, after which no token is chosen.
PositionLogprobs Delivery::next_logprobs_of(SampledToken& token) const {
  PositionLogprobs position = logprobs_of(token);
  position.chosen = {.token_id = -1, .logprob = 0, .bytes = {}};
  return position;
}

// ---- output tokens --------------------------------------------------------------------------------

// Appends a row's token to its sequence and delivers the delta. is_last: no other row of the sequence
// follows.
void Delivery::accept(LogitRow& row, bool is_last) {
  if (row.sequence == nullptr) return;  // it ended while the step was in flight
  Sequence& sequence = *row.sequence;
  Delta delta;
  try {
    if (sequence.num_output_tokens() == 0) count_prompt(sequence);
    if (sequence.disagg.on_held && row.status.ok()) return hold(row);
    count_drafts(sequence, row);
    if (row.depth > 0) parts_.scheduler.keep_draft_row(sequence);
    if (row.status.ok()) delta = put_token(sequence, row.token);
    if (row.status.ok()) row.status = sequence.output.text.failure();
  } catch (const std::exception& error) {
    row.status = internal_error(error.what());
  }
  parts_.totals.generation_tokens_total += std::ssize(delta.token_ids);
  if (!row.status.ok()) {
    delta.finish_reason = FinishReason::kError;
    delta.error = row.status.message();
    delta.error_code = row.status.code();
  }
  if (delta.finish_reason != FinishReason::kNone) return end(sequence, std::move(delta));
  if (sequence.grammar.matcher != nullptr) {
    sequence.grammar.chosen.push_back(row.token.token_id);
    if (is_last) parts_.grammars->advance(sequence);
  }
  deliver(sequence, delta);
  if (const std::string failure = sequence.output.sink->failure(); !failure.empty())
    fail(sequence, internal_error(failure));
}

Delta Delivery::put_token(Sequence& sequence, SampledToken& token) const {
  const SamplingParams& sampling = sequence.request.sampling;
  const std::vector<int32_t>& eos_token_ids = parts_.executor.config().eos_token_ids;
  const int32_t id = token.token_id;
  sequence.token_ids[static_cast<size_t>(sequence.num_known_tokens())] = id;
  --sequence.num_unknown;
  sequence.output.edits.count(id);

  Delta delta{.token_ids = {id}};
  if (sampling.top_logprobs >= 0) delta.logprobs.push_back(logprobs_of(token));
  const bool has_grammar = sequence.grammar.matcher != nullptr;
  const bool may_end = !sampling.ignore_eos || has_grammar;
  const bool is_end = may_end && contains(eos_token_ids, id);
  if (is_end || contains(sampling.stop_token_ids, id)) delta.matched_stop_token = id;
  const bool may_stop = sequence.num_output_tokens() >= sampling.min_new_tokens;
  if (delta.matched_stop_token < 0 || sampling.no_stop_trim)
    delta.text = sequence.output.text.push(id, may_stop);
  // If the model has no end tokens, only the grammar knows whether the text ends here:
  // GrammarManager::check() decides later.
  const bool grammar_decides = has_grammar && eos_token_ids.empty();
  if (delta.matched_stop_token >= 0 || sequence.output.text.is_stopped())
    delta.finish_reason = FinishReason::kStop;
  else if (sequence.num_known_tokens() == sequence.max_tokens && !grammar_decides)
    delta.finish_reason = FinishReason::kLength;
  return delta;
}

void Delivery::deliver(const Sequence& sequence, Delta& delta) {
  delta.prompt_tokens = sequence.num_prompt_tokens;
  delta.cached_tokens = std::max<int64_t>(sequence.kv.num_reused, 0);
  delta.completion_tokens = sequence.num_output_tokens();
  delta.spec_verify_ct = sequence.draft.num_verified;
  delta.spec_num_proposed_drafts = sequence.draft.num_proposed;
  delta.spec_num_correct_drafts = sequence.draft.num_correct;
  sequence.output.sink->send(delta);
}

// ---- disaggregation -------------------------------------------------------------------------------

// A prefill engine's prompt runs like any other request until its first token is chosen; then it is held. The
// token is posted before the last page is opened, so that it arrives first.
void Delivery::hold(LogitRow& row) {
  Sequence& sequence = *row.sequence;
  sequence.token_ids[static_cast<size_t>(sequence.num_known_tokens())] = row.token.token_id;
  --sequence.num_unknown;
  ++parts_.totals.generation_tokens_total;
  FP4MOE_CHECK(parts_.scheduler.hold(sequence), "prompt " + sequence.id + " is not running");
  if (parts_.grammars != nullptr) parts_.grammars->remove(sequence);
  sequence.times.held = Sequence::Clock::now();
  const bool is_complete = parts_.drafter == nullptr || !parts_.drafter->runs_model();
  sequence.disagg.on_held({.token = std::move(row.token),
                           .experts = std::move(sequence.experts.ids),
                           .cached_tokens = sequence.kv.num_reused});
  KvLease& pages = *sequence.disagg.lease;
  pages.stage({sequence.kv.group, sequence.kv.tables, sequence.kv.slot}, pages.shape().num_parts());
  if (is_complete)
    pages.open_staged();
  else
    closed_.push_back(sequence.disagg.lease);
}

void Delivery::open_held_pages(const Status& drafted) {
  for (const auto& pages : closed_)
    if (drafted.ok())
      pages->open_staged();
    else
      pages->fail(drafted);
  closed_.clear();
}

void Delivery::take_first_token(Sequence& sequence) {
  FirstToken& first = *sequence.disagg.first_token;
  sequence.kv.num_reused = std::clamp<int64_t>(first.cached_tokens, 0, sequence.num_prompt_tokens);
  sequence.times.started = Sequence::Clock::now();
  Delta scores;
  sequence.experts.ids = std::move(first.experts);
  for (SampledToken& token : first.scored) scores.prompt_logprobs.push_back(logprobs_of(token));
  if (sequence.is_over()) {  // no output is requested: the last row's experts are not reported
    const ModelConfig& config = parts_.executor.config();
    const int64_t num_rows = std::max<int64_t>(0, sequence.num_prompt_tokens - 1 - sequence.experts.from);
    const int64_t num_experts = num_rows * config.num_layers * config.top_k;
    sequence.experts.ids.resize(std::min(sequence.experts.ids.size(), static_cast<size_t>(num_experts)));
    if (sequence.scores.end > sequence.num_prompt_tokens)
      scores.logprobs.push_back(next_logprobs_of(first.token));
    count_prompt(sequence);
    scores.finish_reason = FinishReason::kLength;
    return end(sequence, std::move(scores));
  }
  if (!first.scored.empty()) deliver(sequence, scores);
  sequence.token_ids.push_back(0);
  sequence.num_unknown = 1;
  sequence.disagg.awaits_pages =
      sequence.disagg.room != 0 && sequence.kv.num_cached < sequence.num_prompt_tokens;
  LogitRow row{&sequence, std::move(first.token), {}, {}};
  accept(row, /*is_last=*/true);
}

// ---- the end --------------------------------------------------------------------------------------

// Works in this order: removes the sequence from the mask threads and the scheduler, which frees its pages;
// determines its last text; releases its id before the client gets the last delta; makes rows in flight
// forget the sequence, and deletes it.
void Delivery::end(Sequence& sequence, Delta delta) {
  const bool failed =
      delta.finish_reason == FinishReason::kError && delta.error_code == StatusCode::kInternal;
  delta.routed_experts = take_experts(sequence, parts_.executor.config());
  delta.spec_correct_drafts_histogram = sequence.draft.num_steps;
  if (parts_.grammars != nullptr) parts_.grammars->remove(sequence);
  if (parts_.drafter != nullptr) parts_.drafter->end(sequence);
  const std::unique_ptr<Sequence> owned = parts_.scheduler.remove(sequence.id, failed);
  FP4MOE_CHECK(owned != nullptr, "sequence " + sequence.id + " is not scheduled");
  if (sequence.disagg.lease != nullptr) sequence.disagg.lease->end();

  delta.text += sequence.output.text.finish();
  count_end(delta);
  if (const OutputText& text = sequence.output.text; text.is_stopped()) {
    delta.finish_reason = FinishReason::kStop;
    delta.matched_stop = text.stop_pattern();
    if (sequence.request.sampling.no_stop_trim) delta.text += text.matched_stop();
  }

  parts_.inbox.release_id(sequence.id);
  if (parts_.remote_prefill != nullptr) parts_.remote_prefill->leave_room(sequence);
  deliver(sequence, delta);
  parts_.rows.forget(sequence);
}

void Delivery::fail(Sequence& sequence, const Status& status) {
  end(sequence,
      {.finish_reason = FinishReason::kError, .error = status.message(), .error_code = status.code()});
}

// ---- counters -------------------------------------------------------------------------------------

void Delivery::count_prompt(const Sequence& sequence) {
  ++parts_.totals.num_prompts_total;
  parts_.totals.prompt_tokens_total += sequence.num_prompt_tokens;
  parts_.totals.cached_tokens_total += sequence.kv.num_reused;
}

// Counts a row that chooses a token after the first one. A row that follows drafts is delivered only if these
// were correct.
void Delivery::count_drafts(Sequence& sequence, const LogitRow& row) {
  if (parts_.drafter == nullptr || sequence.num_output_tokens() == 0) return;
  SequenceDraft& draft = sequence.draft;
  EngineStats& totals = parts_.totals;
  const auto depth = static_cast<size_t>(row.depth);
  if (draft.num_steps.size() <= depth) draft.num_steps.resize(depth + 1);
  ++draft.num_steps[depth];
  if (depth > 0) {
    --draft.num_steps[depth - 1];
    ++draft.num_correct;
    ++draft.num_last_correct;
    ++totals.spec_correct_drafts_total;
    ++totals.spec_correct_by_position[depth - 1];
    return;
  }
  ++draft.num_verified;
  draft.num_proposed += row.num_drafts;
  draft.num_last_proposed = row.num_drafts;
  draft.num_last_correct = 0;
  ++totals.spec_verify_calls_total;
  totals.spec_proposed_drafts_total += row.num_drafts;
  for (int64_t i = 0; i < row.num_drafts; ++i) ++totals.spec_proposed_by_position[static_cast<size_t>(i)];
}

void Delivery::count_end(const Delta& delta) {
  if (delta.finish_reason == FinishReason::kAbort) ++parts_.totals.num_aborted_requests_total;
  if (delta.finish_reason == FinishReason::kError) ++parts_.totals.num_failed_requests_total;
  ++parts_.totals.num_requests_total;
}

}  // namespace fp4moe
