#include "engine/step/model_drafter.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

// Returns how many of the sequence's tokens have draft keys and values: the drafts that were chained and then
// accepted have them too.
int64_t num_draft_cached(const Sequence& sequence) {
  const SequenceDraft& draft = sequence.draft;
  int64_t num_cached = draft.num_cached;
  for (int64_t i = 0; i < draft.num_chained && num_cached < sequence.num_known_tokens(); ++i, ++num_cached)
    if (sequence.token_ids[static_cast<size_t>(num_cached)] != draft.ids[static_cast<size_t>(i)]) break;
  return num_cached;
}

}  // namespace

ModelDrafter::ModelDrafter(Executor& executor, int64_t max_drafts, bool shares_pages,
                           std::span<const int32_t> masked_ids)
    : executor_(executor),
      shape_(executor.draft_shape()),
      max_drafts_(max_drafts),
      shares_pages_(shares_pages),
      page_size_(executor.page_size()),
      is_masked_(static_cast<size_t>(executor.config().vocab_size)) {
  FP4MOE_CHECK(shape_.vocab_size > 0, "the executor has no draft model");
  const auto num_groups = static_cast<size_t>(executor.num_groups());
  last_.resize(num_groups);
  passes_.resize(num_groups);
  const std::vector<int64_t> pages(static_cast<size_t>(executor.num_kv_pages()));
  written_.assign(num_groups, pages);
  granted_.assign(num_groups, pages);
  for (const int32_t id : masked_ids) is_masked_[static_cast<size_t>(id)] = true;
}

// ---- the last step --------------------------------------------------------------------------------

void ModelDrafter::keep_step(const DpScheduler& scheduler) {
  for (int group = 0; group < scheduler.num_groups(); ++group) {
    std::vector<Kept>& kept = last_[static_cast<size_t>(group)];
    kept.clear();
    int64_t first_row = 0;
    for (const ScheduledRows& rows : scheduler.step(group)) {
      const int64_t count = rows.num_rows + rows.num_drafts, first = rows.sequence->kv.num_cached;
      const auto table = rows.sequence->kv.tables.full.begin();
      Kept& added = kept.emplace_back();
      added.sequence = rows.sequence;
      added.first_row = first_row;
      added.num_rows = count;
      added.first_position = first;
      added.decodes = decodes(*rows.sequence) && rows.num_rows == 1;
      added.moves = rows.sequence->num_unknown > 0;
      added.num_in_flight = rows.sequence->draft.num_in_flight;
      added.first_page = page_of(first);
      added.pages.assign(table + added.first_page,
                         table + page_of(first + added.num_in_flight + count - 1) + 1);
      first_row += count;
    }
  }
}

// Keeps what is needed to extend its rows: its pages may have been published, but are not reused before the
// next step is planned.
void ModelDrafter::end(const Sequence& sequence) {
  for (std::vector<Kept>& group : last_) {
    const auto kept = std::ranges::find(group, &sequence, &Kept::sequence);
    if (kept == group.end()) continue;
    kept->sequence = nullptr;
    // If the rows still move, all rows of its tokens were extended with the step before.
    if (!shares_pages_ || runs_ahead(*kept) || kept->moves) return;
    const auto first = sequence.token_ids.begin();
    kept->token_ids.assign(first, first + sequence.num_known_tokens());
    kept->page_table = sequence.kv.tables.full;
    kept->num_cached = sequence.kv.num_cached;
    kept->num_draft_cached = num_draft_cached(sequence);
  }
}

// The rows of logits are those of the step, in the same order.
Status ModelDrafter::run_ahead(int64_t num_sampled) {
  if (!may_run_ahead(num_sampled)) return {};
  begin_drafts();
  clear_passes();
  const bool is_moving = std::ranges::any_of(
      last_, [](const std::vector<Kept>& group) { return std::ranges::any_of(group, &Kept::moves); });
  for (size_t g = 0; g < last_.size(); ++g)
    for (Kept& kept : last_[g]) {
      Pass& pass = passes_[g];
      kept.first_id = first_id_ + num_kept_;
      if (is_moving) pass.rows.moves.push_back({.row = kept.moves ? num_kept_ : -1});
      std::vector<int32_t> ids;
      for (int64_t row = kept.first_row; row < kept.first_row + kept.num_rows; ++row) {
        ids.push_back(~num_kept_++);
        pass.feature_rows.push_back(row);
        pass.rows.logit_rows.push_back(row);
      }
      Work work;
      work.page_table = kept.sequence->kv.tables.full;
      add_rows(pass, work, ids, kept.first_position);
    }
  FP4MOE_RETURN_IF_ERROR(execute_pass(/*chains=*/false));
  is_ahead_ = true;
  return {};
}

// Not with a grammar, whose late masks drop rows, nor with a page that publication has exchanged.
bool ModelDrafter::may_run_ahead(int64_t num_sampled) const {
  if (!executor_.keeps_draft_ids() || !shape_.takes_features) return false;
  if (shape_.num_input_ids < executor_.config().vocab_size) return false;  // any token may be sampled
  int64_t num_rows = 0, num_sequences = 0;
  for (const std::vector<Kept>& group : last_)
    for (const Kept& kept : group) {
      if (!kept.decodes || kept.sequence->grammar.matcher != nullptr ||
          kept.first_position + kept.num_in_flight + kept.num_rows > shape_.max_positions ||
          end_of_exchanged_pages(kept, kept.sequence->kv.tables.full) > 0)
        return false;
      num_rows += kept.num_rows;
      ++num_sequences;
    }
  const bool has_drafts = num_rows > num_sequences;
  return has_drafts && num_rows == num_sampled && num_rows <= executor_.num_cheap_draft_rows();
}

void ModelDrafter::begin_drafts() {
  first_id_ = executor_.begin_drafts();
  num_kept_ = 0;
}

// ---- the rows to compute --------------------------------------------------------------------------

Status ModelDrafter::draft(DpScheduler& scheduler) {
  ++call_;
  std::vector<std::vector<Kept>> last(last_.size());
  last.swap(last_);
  std::vector<std::vector<Work>> work(last.size());
  for (size_t g = 0; g < last.size(); ++g)
    for (const Kept& kept : last[g])
      work[g].push_back(kept.sequence == nullptr ? work_of(kept) : work_of(*kept.sequence, kept, scheduler));
  for (size_t g = 0; g < work.size(); ++g)
    for (Work& one : work[g]) claim_pages(static_cast<int>(g), one);
  if (!std::exchange(is_ahead_, false)) begin_drafts();
  FP4MOE_RETURN_IF_ERROR(extend(work));
  FP4MOE_RETURN_IF_ERROR(chain_and_keep(work));
  has_waited_ = !executor_.keeps_draft_ids() || (num_kept_ > 0 && (waits_ || host_needs_ids(work)));
  waits_ = false;
  return num_kept_ > 0 && has_waited_ ? take_ids(work) : Status();
}

// All rows of the step in flight have been extended. The sequences' ids stay on the device.
Status ModelDrafter::draft_ahead(DpScheduler& scheduler) {
  FP4MOE_CHECK(is_ahead_, "the rows of the step in flight have not been extended");
  ++call_;
  is_ahead_ = has_waited_ = waits_ = false;
  std::vector<std::vector<Kept>> last(last_.size());
  last.swap(last_);
  std::vector<std::vector<Work>> work(last.size());
  for (size_t g = 0; g < last.size(); ++g)
    for (const Kept& kept : last[g])
      if (kept.sequence != nullptr) work[g].push_back(work_ahead(*kept.sequence, kept, scheduler));
  return chain_and_keep(work);
}

// As if no draft of the step in flight were right: the device moves the first chained row.
ModelDrafter::Work ModelDrafter::work_ahead(Sequence& sequence, const Kept& kept, DpScheduler& scheduler) {
  Work work{.sequence = &sequence};
  work.next = work.end = kept.first_position + 1;
  work.moved_by = ~sequence.token_ids.back();
  work.max_drafts = plan_drafts(sequence, kept.first_position + sequence.draft.num_in_flight, scheduler);
  work.page_table = sequence.kv.tables.full;
  work.row = kept.first_row;
  if (work.max_drafts > 0) work.drafts.push_back(~kept.first_id);
  return work;
}

// The step before the last one has been delivered, and commit_step() has counted the row that the last one
// has for the token after it.
void ModelDrafter::settle_step() {
  for (std::vector<Kept>& group : last_)
    for (Kept& kept : group) {
      if (kept.sequence != nullptr) kept.first_position = kept.sequence->kv.num_cached - 1;
      kept.moves = false;
    }
}

// Drafts the rest of each sequence's chain and gives the sequences their drafts.
Status ModelDrafter::chain_and_keep(std::vector<std::vector<Work>>& work) {
  FP4MOE_RETURN_IF_ERROR(chain(work));
  for (std::vector<Work>& group : work)
    for (Work& one : group) {
      if (one.sequence == nullptr) continue;
      SequenceDraft& draft = one.sequence->draft;
      draft.num_cached = std::max(draft.num_cached, one.end);
      // The last draft has not been a chained row's token.
      draft.num_chained = shape_.takes_features ? 0 : std::max<int64_t>(0, std::ssize(one.drafts) - 1);
      draft.ids = std::move(one.drafts);
    }
  return {};
}

// Returns the end of those of the rows' pages that publication has exchanged for another sequence's with the
// same tokens, or 0. That sequence extends their rows or has done so, and another node may be reading them.
int64_t ModelDrafter::end_of_exchanged_pages(const Kept& kept, std::span<const int32_t> page_table) const {
  const int64_t first = kept.first_page;
  for (int64_t i = std::ssize(kept.pages) - 1; i >= 0; --i)
    if (first + i < std::ssize(page_table) &&
        page_table[static_cast<size_t>(first + i)] != kept.pages[static_cast<size_t>(i)])
      return (first + i + 1) * page_size_;
  return 0;
}

// The rows of a sequence that has ended.
ModelDrafter::Work ModelDrafter::work_of(const Kept& kept) const {
  Work work;
  if (kept.token_ids.empty()) return work;
  const int64_t num_tokens = std::ssize(kept.token_ids);
  work.input_ids = std::span(kept.token_ids).subspan(shape_.takes_features ? 1 : 0);
  work.page_table = kept.page_table;
  work.next =
      shape_.takes_features ? std::max(kept.num_draft_cached, kept.first_position) : kept.num_draft_cached;
  work.end = std::min({kept.num_cached, std::ssize(work.input_ids), shape_.max_positions});
  work.end = first_foreign_id(work.input_ids, work.end);
  work.next = std::max(work.next, end_of_exchanged_pages(kept, work.page_table));
  work.feature_offset = kept.first_row - kept.first_position;
  FP4MOE_CHECK(work.end <= num_tokens, "rows beyond the tokens");
  return work;
}

ModelDrafter::Work ModelDrafter::work_of(Sequence& sequence, const Kept& kept, DpScheduler& scheduler) {
  if (sequence.kv.num_cached == kept.first_position) return {};  // its row was dropped: the drafts stay valid
  const bool takes_features = shape_.takes_features;
  sequence.draft.num_cached = num_draft_cached(sequence);
  sequence.draft.num_chained = 0;
  sequence.draft.ids.clear();
  const auto known = std::span(sequence.token_ids).first(static_cast<size_t>(sequence.num_known_tokens()));
  Work work{.sequence = &sequence};
  work.input_ids = known.subspan(takes_features ? 1 : 0);
  const int64_t num_inputs = std::ssize(work.input_ids);
  work.end = std::min(num_inputs, sequence.kv.num_cached);
  if (first_foreign_id(work.input_ids, num_inputs) == num_inputs)
    work.max_drafts = plan_drafts(sequence, num_inputs - 1, scheduler);
  if (work.max_drafts > 0) work.end = num_inputs;
  work.end = first_foreign_id(work.input_ids, std::min(work.end, shape_.max_positions));
  work.next = takes_features
                  ? std::max(sequence.draft.num_cached, kept.first_position)
                  : std::min(sequence.draft.num_cached, work.max_drafts > 0 ? work.end - 1 : work.end);
  work.feature_offset = kept.first_row - kept.first_position;
  work.page_table = sequence.kv.tables.full;
  if (runs_ahead(kept)) {
    continue_ahead(work, kept);
    return work;
  }
  if (work.max_drafts == 0) work.next = std::max(work.next, end_of_exchanged_pages(kept, work.page_table));
  return work;
}

// All rows are computed; the first draft is the one that follows the last of them with a correct token.
void ModelDrafter::continue_ahead(Work& work, const Kept& kept) {
  work.next = work.end;
  if (work.max_drafts == 0) return;
  const int64_t last = std::ssize(work.input_ids) - 1 - kept.first_position;
  work.row = kept.first_row + last;
  work.drafts.push_back(~(kept.first_id + static_cast<int32_t>(last)));
}

// Returns how many tokens to draft after the row at position `last`, and gets the sequence pages for their
// rows.
int64_t ModelDrafter::plan_drafts(Sequence& sequence, int64_t last, DpScheduler& scheduler) {
  if (!may_draft(sequence)) return 0;
  const int64_t wanted =
      std::min({max_drafts_, sequence.draft.most, sequence.max_tokens - sequence.num_tokens_at_most() - 1,
                shape_.max_positions - last});
  if (wanted <= 0) return 0;
  const std::vector<int32_t>& table = sequence.kv.tables.full;
  const size_t num_pages = table.size();
  const int64_t num_positions = scheduler.grow_for_drafts(sequence, last + wanted);
  for (size_t i = num_pages; i < table.size(); ++i)
    granted_[static_cast<size_t>(sequence.kv.group)][static_cast<size_t>(table[i])] = call_;
  return std::max<int64_t>(0, num_positions - last);
}

// Returns the index of the first of the first `end` ids that the draft model does not have, or `end`.
int64_t ModelDrafter::first_foreign_id(std::span<const int32_t> input_ids, int64_t end) const {
  if (shape_.num_input_ids >= executor_.config().vocab_size) return end;
  const auto ids = input_ids.first(static_cast<size_t>(std::max<int64_t>(0, end)));
  return std::ranges::find_if(ids, [this](int32_t id) { return id >= shape_.num_input_ids; }) - ids.begin();
}

// Sequences that computed the same tokens in the last step may share the pages that this has filled: the
// first of them extends their rows. A page that has just been given to another sequence no longer belongs to
// one that has ended; the pages before it may be published.
void ModelDrafter::claim_pages(int group, Work& work) {
  std::vector<int64_t>& written = written_[static_cast<size_t>(group)];
  const auto page_at = [&](int64_t position) {
    return static_cast<size_t>(work.page_table[static_cast<size_t>(page_of(position))]);
  };
  if (work.sequence == nullptr) work.end = end_before_granted_page(group, work);
  // The pages before a shared page are shared too: another sequence extends or has extended them.
  for (int64_t p = work.next; p < work.end; p = (page_of(p) + 1) * page_size_)
    if (written[page_at(p)] == call_) work.next = (page_of(p) + 1) * page_size_;
  if (work.next >= work.end && work.drafts.empty()) work.max_drafts = 0;
  for (int64_t p = work.next; p < work.end; p = (page_of(p) + 1) * page_size_) written[page_at(p)] = call_;
}

int64_t ModelDrafter::end_before_granted_page(int group, const Work& work) const {
  for (int64_t p = work.next; p < work.end; p = (page_of(p) + 1) * page_size_) {
    const int32_t page = work.page_table[static_cast<size_t>(page_of(p))];
    if (granted_[static_cast<size_t>(group)][static_cast<size_t>(page)] == call_) return p;
  }
  return work.end;
}

// ---- passes of the draft model --------------------------------------------------------------------

// Computes all rows up to `end`, and the first draft of each sequence that gets any.
Status ModelDrafter::extend(std::vector<std::vector<Work>>& work) {
  return run_passes(work, /*chains=*/false, [this](Pass& pass, Work& one) {
    const int64_t room = shape_.max_batch_tokens - std::ssize(pass.rows.token_ids);
    const int64_t count = std::min(one.end - one.next, room);
    if (count <= 0) return false;
    const auto ids = one.input_ids.subspan(static_cast<size_t>(one.next), static_cast<size_t>(count));
    add_rows(pass, one, ids, one.next);
    for (int64_t p = one.next; shape_.takes_features && p < one.next + count; ++p)
      pass.feature_rows.push_back(p + one.feature_offset);
    one.next += count;
    if (one.next == one.end && one.max_drafts > 0) choose_after(pass, one);
    return true;
  });
}

// Draft i + 1 is the token after draft i, whose row is at position end - 1 + i.
Status ModelDrafter::chain(std::vector<std::vector<Work>>& work) {
  return run_passes(work, /*chains=*/true, [this](Pass& pass, Work& one) {
    const int64_t num_drafts = std::ssize(one.drafts);
    if (num_drafts == 0 || num_drafts >= one.max_drafts || one.drafts.back() >= shape_.num_input_ids)
      return false;
    if (shape_.takes_features) pass.feature_rows.push_back(one.row);
    if (one.moved_by >= 0)
      pass.rows.moves.push_back({.row = one.moved_by, .follows = true, .num_ids = num_drafts == 1 ? 1 : 0});
    add_rows(pass, one, std::span(one.drafts).last(1), one.end - 1 + num_drafts);
    choose_after(pass, one);
    return true;
  });
}

// Runs passes of the rows that `add` adds for each sequence (false: none), until it adds none.
template <class Add>
Status ModelDrafter::run_passes(std::vector<std::vector<Work>>& work, bool chains, const Add& add) {
  while (true) {
    clear_passes();
    bool has_rows = false;
    for (size_t g = 0; g < work.size(); ++g)
      for (Work& one : work[g]) has_rows |= add(passes_[g], one);
    if (!has_rows) return {};
    FP4MOE_RETURN_IF_ERROR(run_pass(chains));
  }
}

void ModelDrafter::clear_passes() {
  for (Pass& pass : passes_) {
    pass.rows.clear();
    pass.feature_rows.clear();
    pass.choosing.clear();
  }
}

void ModelDrafter::add_rows(Pass& pass, Work& work, std::span<const int32_t> ids, int64_t first_position) {
  const int64_t first_row = std::ssize(pass.rows.token_ids), count = std::ssize(ids);
  pass.rows.sequences.push_back({first_row, count, first_position, work.page_table, {}});
  pass.rows.token_ids.insert(pass.rows.token_ids.end(), ids.begin(), ids.end());
  for (int64_t p = first_position; p < first_position + count; ++p) pass.rows.positions.push_back(p);
  work.row = first_row + count - 1;
}

void ModelDrafter::choose_after(Pass& pass, Work& work) {
  pass.rows.logit_rows.push_back(work.row);
  pass.choosing.push_back(&work);
}

// Runs the rows of all groups, and appends the token of each row of logits to its sequence's drafts.
Status ModelDrafter::run_pass(bool chains) {
  FP4MOE_RETURN_IF_ERROR(execute_pass(chains));
  std::vector<Work*> choosing;
  for (const Pass& pass : passes_)
    choosing.insert(choosing.end(), pass.choosing.begin(), pass.choosing.end());
  return choosing.empty() ? Status() : choose_ids(choosing);
}

Status ModelDrafter::execute_pass(bool chains) {
  std::vector<Batch> batches;
  for (Pass& pass : passes_) {
    Batch& batch = batches.emplace_back(pass.rows.batch());
    batch.model = BatchModel::kDraft;
    batch.feature_rows = pass.feature_rows;
    batch.chains = chains && shape_.takes_features;
  }
  return executor_.execute_step(batches);
}

// A row without a token ends its sequence's drafts.
Status ModelDrafter::choose_ids(std::span<Work* const> choosing) {
  if (executor_.keeps_draft_ids()) {
    for (Work* one : choosing) one->drafts.push_back(~(first_id_ + num_kept_++));
    return {};
  }
  std::vector<int32_t> ids(choosing.size());
  FP4MOE_RETURN_IF_ERROR(executor_.take_draft_ids(first_id_, ids));
  for (size_t i = 0; i < ids.size(); ++i) {
    Work& one = *choosing[i];
    if (ids[i] < 0 || is_masked_[static_cast<size_t>(ids[i])])
      one.max_drafts = std::ssize(one.drafts);
    else
      one.drafts.push_back(ids[i]);
  }
  return {};
}

bool ModelDrafter::host_needs_ids(const std::vector<std::vector<Work>>& work) const {
  for (const std::vector<Work>& group : work)
    for (const Work& one : group)
      if (one.max_drafts > 0 &&
          (one.sequence->output.edits.has_penalties() || one.sequence->grammar.matcher != nullptr))
        return true;
  return false;
}

// Waits for the ids that stayed on the device.
Status ModelDrafter::take_ids(const std::vector<std::vector<Work>>& work) {
  std::vector<int32_t> ids(static_cast<size_t>(num_kept_));
  FP4MOE_RETURN_IF_ERROR(executor_.take_draft_ids(first_id_, ids));
  for (const std::vector<Work>& group : work)
    for (const Work& one : group)
      if (one.max_drafts > 0) reveal_drafts(one.sequence->draft, first_id_, ids);
  return {};
}

}  // namespace fp4moe
