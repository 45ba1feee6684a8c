#include "engine/step/step_rows.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/check.h"
#include "engine/step/drafter.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

// The move of a sequence's rows while the step before is in flight: its token and its first draft are those
// after the right drafts.
RowsMove move_after(const Sequence& sequence, int64_t num_drafts) {
  if (sequence.num_unknown == 0) return {};
  return {.row = ~sequence.token_ids.back(), .follows = true, .num_ids = num_drafts > 0 ? 2 : 1};
}

}  // namespace

StepRows::StepRows(Executor& executor, std::vector<int32_t> masked_ids, const Drafts& drafts)
    : executor_(executor),
      runs_ahead_(executor.samples() && !drafts.can_exist),
      accepts_drafts_(drafts.are_accepted),
      synthetic_acceptance_(drafts.synthetic_acceptance),
      sampler_(executor.config().vocab_size, std::move(masked_ids)),
      groups_(static_cast<size_t>(executor.num_groups())) {}

// ---- forward pass ---------------------------------------------------------------------------------

Status StepRows::forward(DpScheduler& scheduler) {
  std::vector<Batch> batches;
  num_rows_ = 0;
  for (int group = 0; group < scheduler.num_groups(); ++group) {
    GroupRows& rows = groups_[static_cast<size_t>(group)];
    gather(rows, scheduler.step(group));
    rows.state_copies = scheduler.take_state_copies(group);
    rows.allocate_experts(scheduler.step(group), executor_.config());
    batches.push_back(rows.batch());
    num_rows_ += batches.back().num_rows();
  }
  return executor_.execute_step(batches);
}

void StepRows::gather(GroupRows& rows, std::span<const ScheduledRows> step) {
  rows.clear();
  for (const ScheduledRows& scheduled : step) {
    Sequence& sequence = *scheduled.sequence;
    if (sequence.times.started == Sequence::Clock::time_point())
      sequence.times.started = Sequence::Clock::now();
    const int64_t first_row = static_cast<int64_t>(rows.token_ids.size()), first = sequence.kv.num_cached;
    const PageTables& tables = sequence.kv.tables;
    const int64_t num_drafts = scheduled.num_drafts;
    rows.sequences.push_back(
        {first_row, scheduled.num_rows + num_drafts, first, tables.full, tables.window, sequence.kv.slot});
    if (sequence.kv.slot != 0) {
      rows.sequences.back().num_replayed = sequence.kv.num_replayed;
      rows.sequences.back().num_tentative = static_cast<int32_t>(num_drafts);
    }
    if (stays_current_) rows.moves.push_back(move_after(sequence, num_drafts));
    for (int64_t position = first; position < first + scheduled.num_rows; ++position) {
      rows.token_ids.push_back(sequence.token_ids[static_cast<size_t>(position)]);
      rows.positions.push_back(position);
      if (!sequence.is_scored(position)) continue;
      rows.logit_rows.push_back(first_row + position - first);
      const bool is_last = position + 1 == sequence.num_prompt_tokens;  // only listed ids are wanted
      const int32_t scored_id = is_last ? 0 : sequence.token_ids[static_cast<size_t>(position) + 1];
      next_.push_back({&sequence, {.token_id = scored_id}, {}, /*is_scored=*/true});
      sequence.scores.next = position + 2;
    }
    if (!scheduled.reaches_end() || sequence.is_complete()) continue;
    rows.logit_rows.push_back(first_row + scheduled.num_rows - 1);
    next_.push_back({.sequence = &sequence, .num_drafts = num_drafts});
    for (int64_t i = 0; i < num_drafts; ++i) {
      rows.token_ids.push_back(sequence.draft.ids[static_cast<size_t>(i)]);
      rows.positions.push_back(sequence.num_tokens() + i);
      rows.logit_rows.push_back(first_row + scheduled.num_rows + i);
      next_.push_back({.sequence = &sequence, .depth = i + 1});
    }
  }
}

// ---- sampling -------------------------------------------------------------------------------------

Status StepRows::start_sample() {
  if (!executor_.samples()) return {};
  FP4MOE_RETURN_IF_ERROR(start_on_executor());
  const bool chooses_in_all =
      std::ssize(next_) == num_rows_ && num_rows_ > 0 && std::ranges::none_of(next_, &LogitRow::is_scored);
  return accepts_drafts_ && chooses_in_all ? executor_.accept_drafts() : Status();
}

bool StepRows::can_stay() const {
  return accepts_drafts_ && std::ranges::all_of(next_, [](const LogitRow& row) {
           return row.sequence != nullptr && !row.is_scored && row.sequence->allows_unknown_drafts();
         });
}

Status StepRows::sample(bool can_stay) {
  if (stays_current_ || can_stay) {
    leave_in_flight();
    return {};
  }
  if (!executor_.samples()) {
    sample_on_host();
  } else if (!runs_ahead_) {
    FP4MOE_RETURN_IF_ERROR(take_from_executor(next_));
    FP4MOE_RETURN_IF_ERROR(take_drafts());
  }
  if (!runs_ahead_) drop_wrong_drafts();
  record_experts();
  for (size_t r = 0; r < next_.size(); ++r) {
    if (next_[r].is_scored || next_[r].sequence == nullptr) continue;
    next_[r].sequence->token_ids.push_back(~static_cast<int32_t>(r));
    ++next_[r].sequence->num_unknown;
  }
  return {};
}

void StepRows::sample_on_host() {
  const int64_t vocab_size = executor_.config().vocab_size;
  executor_.pool().run(static_cast<int64_t>(next_.size()), [&](int64_t i, int) {
    LogitRow& row = next_[static_cast<size_t>(i)];
    if (row.sequence == nullptr) return;
    const std::span<float> logits(executor_.logits() + i * vocab_size, static_cast<size_t>(vocab_size));
    const Sequence& sequence = *row.sequence;
    const SamplingParams& sampling = sequence.request.sampling;
    try {
      const double random = token_random(sequence.request.seed, sequence.num_tokens() + row.depth);
      std::vector<LogitEdit> edits;
      if (!row.is_scored) append_edits(row, edits);
      Result<SampledToken> token = row.is_scored
                                       ? sampler_.score(logits, row.token.token_id, sampling)
                                       : sampler_.sample(logits, sampling, random, edits, row.allowed);
      row.status = token.status();
      if (token.ok()) row.token = std::move(*token);
    } catch (const std::exception& error) {  // out of memory: the exception must not leave the worker
      row.status = internal_error(error.what());
    }
  });
}

// Appends the row's edits. With a synthetic acceptance one more edit makes the row choose the draft that
// follows it, or another token.
void StepRows::append_edits(const LogitRow& row, std::vector<LogitEdit>& edits) const {
  const auto first = std::ssize(edits);
  append_own_edits(row, edits);
  const Sequence& sequence = *row.sequence;
  if (synthetic_acceptance_ < 0 || row.depth >= std::ssize(sequence.draft.ids)) return;
  const int32_t draft = sequence.draft.ids[static_cast<size_t>(row.depth)];
  const double random = token_random(~sequence.request.seed, sequence.num_tokens() + row.depth);
  constexpr float kDecisive = 1e9f;
  const auto is_same_id = [&](const LogitEdit& edit) { return edit.token_id == draft; };
  edits.erase(std::remove_if(edits.begin() + first, edits.end(), is_same_id), edits.end());
  edits.push_back({.token_id = draft, .bias = random < synthetic_acceptance_ ? kDecisive : -kDecisive});
}

// Appends the edits of the row's request as if the drafts before the row were output tokens.
void StepRows::append_own_edits(const LogitRow& row, std::vector<LogitEdit>& edits) const {
  const Sequence& sequence = *row.sequence;
  const int64_t n = sequence.num_tokens() + row.depth - sequence.num_prompt_tokens;
  if (row.depth == 0 || !sequence.output.edits.has_penalties()) return sequence.output.edits.append(n, edits);
  LogitEdits assumed = sequence.output.edits;
  for (int64_t i = 0; i < row.depth; ++i) assumed.count(sequence.draft.ids[static_cast<size_t>(i)]);
  assumed.append(n, edits);
}

// Takes the drafts whose ids stayed on the device. They are there, since the step that read them is done.
Status StepRows::take_drafts() {
  KeptDrafts kept;
  for (const LogitRow& row : next_)
    if (row.sequence != nullptr && !row.is_scored && row.depth == 0) kept.add(row.sequence->draft);
  if (kept.size() == 0) return {};
  std::vector<int32_t> ids(kept.size());
  FP4MOE_RETURN_IF_ERROR(executor_.take_draft_ids(kept.first, ids));
  for (LogitRow& row : next_) {
    if (row.sequence == nullptr || row.is_scored || row.depth > 0) continue;
    SequenceDraft& draft = row.sequence->draft;
    reveal_drafts(draft, kept.first, ids);
    row.num_drafts = std::min(row.num_drafts, std::ssize(draft.ids));
  }
  return {};
}

// Drops the rows that follow a draft other than the token that the row before them has chosen, or no draft.
void StepRows::drop_wrong_drafts() {
  for (size_t r = 1; r < next_.size(); ++r) {
    if (next_[r].depth == 0 || next_[r].sequence == nullptr) continue;
    const LogitRow& before = next_[r - 1];
    const std::vector<int32_t>& drafts = next_[r].sequence->draft.ids;
    const auto depth = static_cast<size_t>(next_[r].depth);
    if (before.sequence == nullptr || !before.status.ok() || depth > drafts.size() ||
        before.token.token_id != drafts[depth - 1])
      next_[r].sequence = nullptr;
  }
}

// Until the right drafts are known, a sequence has the token after its last known one.
void StepRows::leave_in_flight() {
  stays_next_ = true;
  for (size_t r = 0; r < next_.size(); ++r) {
    if (next_[r].depth > 0 || next_[r].sequence == nullptr) continue;
    Sequence& sequence = *next_[r].sequence;
    sequence.token_ids.push_back(~static_cast<int32_t>(r));
    ++sequence.num_unknown;
    sequence.draft.num_in_flight = next_[r].num_drafts;
  }
}

// Keeps the rows that follow right drafts, as the executor has counted them, and gives their sequence places
// for their tokens. The sequence may have one more unknown token, of the step after.
void StepRows::keep_right_drafts() {
  for (size_t r = 0; r < current_.size(); ++r) {
    LogitRow& row = current_[r];
    if (row.depth > 0) continue;
    const int64_t num_right = sampled_[r].num_right;
    FP4MOE_CHECK(num_right >= 0 && num_right <= row.num_drafts,
                 std::to_string(num_right) + " right drafts of " + std::to_string(row.num_drafts));
    for (int64_t depth = num_right + 1; depth <= row.num_drafts; ++depth)
      current_[r + static_cast<size_t>(depth)].sequence = nullptr;
    row.num_drafts = sampled_[r].num_drafts;
    if (row.sequence == nullptr) continue;
    Sequence& sequence = *row.sequence;
    if (sequence.num_unknown == 1) sequence.draft.num_in_flight = 0;
    sequence.token_ids.insert(sequence.token_ids.begin() + sequence.num_known_tokens(),
                              static_cast<size_t>(num_right), 0);
    sequence.num_unknown += num_right;
  }
}

// Records the experts of the rows that are left: those of prompt tokens and of chosen tokens.
void StepRows::record_experts() {
  size_t r = 0;
  for (const GroupRows& rows : groups_)
    for (int64_t index = 0; index < std::ssize(rows.logit_rows); ++index, ++r)
      if (next_[r].sequence != nullptr) rows.record_experts(index, *next_[r].sequence, executor_.config());
}

Status StepRows::start_on_executor() {
  if (next_.empty()) return {};
  params_.clear();
  edits_.clear();
  allowed_.clear();
  logprob_ids_.clear();
  for (LogitRow& row : next_) params_.push_back(params_of(row));
  return executor_.start_sample(params_, edits_, allowed_, logprob_ids_);
}

// Returns the row's parameters and appends its edits, mask and listed ids to edits_, allowed_ and
// logprob_ids_. The row keeps the ids, because its sequence may have ended when their log-probabilities
// arrive.
SampleRowParams StepRows::params_of(LogitRow& row) {
  if (row.sequence == nullptr) return {};  // the executor expects one entry per logit row of the step
  const Sequence& sequence = *row.sequence;
  const SamplingParams& sampling = sequence.request.sampling;
  const size_t first_edit = edits_.size();
  if (!row.is_scored) append_edits(row, edits_);
  int32_t mask = -1;
  if (!row.allowed.empty()) {
    mask = static_cast<int32_t>(allowed_.size() / row.allowed.size());
    allowed_.insert(allowed_.end(), row.allowed.begin(), row.allowed.end());
  }
  const size_t first_id = logprob_ids_.size();
  for (const int32_t id : sampling.token_ids_logprob) {
    logprob_ids_.push_back(id);
    row.token.ids.push_back({id, 0, {}});
  }
  const uint64_t state = random_state(sequence.request.seed, sequence.num_tokens() + row.depth);
  return {.random = random_number(state),
          .temperature = sampling.temperature,
          .top_p = sampling.top_p,
          .top_k = sampling.top_k,
          .top_logprobs = sampling.top_logprobs,
          .min_p = sampling.min_p,
          .given_id = row.is_scored ? row.token.token_id : -1,
          .first_edit = static_cast<int32_t>(first_edit),
          .num_edits = static_cast<int32_t>(edits_.size() - first_edit),
          .first_logprob_id = static_cast<int32_t>(first_id),
          .num_logprob_ids = static_cast<int32_t>(sampling.token_ids_logprob.size()),
          .allowed = mask,
          .random_state = state};
}

Status StepRows::take_sampled() {
  if (runs_ahead_) return take_from_executor(current_);
  if (stays_current_) {
    FP4MOE_RETURN_IF_ERROR(take_from_executor(current_));
    stays_current_ = false;
    keep_right_drafts();
    return {};
  }
  if (!stays_next_) advance();
  return {};
}

// Fills in the tokens of the earliest rows whose sampling was enqueued.
Status StepRows::take_from_executor(std::span<LogitRow> rows) {
  if (rows.empty()) return {};
  sampled_.resize(rows.size());
  size_t num_ids = 0;
  for (const LogitRow& row : rows) num_ids += row.token.ids.size();
  id_logprobs_.resize(num_ids);
  FP4MOE_RETURN_IF_ERROR(executor_.take_sampled(sampled_, id_logprobs_));
  size_t next_id = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampledRow& sampled = sampled_[i];
    LogitRow& row = rows[i];
    if (sampled.status == SampleStatus::kBadLogits) row.status = bad_logits();
    if (sampled.status == SampleStatus::kNoToken) row.status = no_token();
    row.token.token_id = sampled.token_id;
    row.token.logprob = sampled.logprob;
    for (TokenLogprob& listed : row.token.ids) listed.logprob = id_logprobs_[next_id++];
    for (int32_t k = 0; k < sampled.num_top; ++k)
      row.token.top.push_back({sampled.top_ids[k], sampled.top_logprobs[k], {}});
  }
  return {};
}

void StepRows::advance() {
  current_.clear();
  current_.swap(next_);
  stays_current_ = std::exchange(stays_next_, false);
}

void StepRows::forget(const Sequence& sequence) {
  for (std::vector<LogitRow>* rows : {&current_, &next_})
    for (LogitRow& row : *rows)
      if (row.sequence == &sequence) row.sequence = nullptr;
}

}  // namespace fp4moe
