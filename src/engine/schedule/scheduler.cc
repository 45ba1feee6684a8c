#include "engine/schedule/scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/check.h"

namespace fp4moe {
Scheduler::Scheduler(const SchedulerLimits& limits, const PoolShape& pool)
    : limits_(limits), pages_(pool), new_token_ratio_(limits.conservativeness) {
  const int64_t least = std::min(pages_.window().most_pages(1), pages_.num_pages());
  FP4MOE_CHECK(!pages_.has_window() || pages_.num_window_pages() >= least,
               std::to_string(pages_.num_window_pages()) + " window pages; one sequence needs " +
                   std::to_string(least));
  running_.reserve(static_cast<size_t>(limits.max_running_requests));
  step_.reserve(static_cast<size_t>(limits.max_running_requests));
}

Scheduler::~Scheduler() {
  for (auto* sequences : {&running_, &held_})
    for (auto& sequence : *sequences) give_back_pages(*sequence);
}

void Scheduler::enqueue(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }

const std::vector<ScheduledRows>& Scheduler::plan_step() {
  begin_step();
  finish_step();
  FP4MOE_CHECK(!step_.empty() || is_waiting() || (running_.empty() && waiting_.empty()),
               "no rows for " + std::to_string(running_.size()) + " running and " +
                   std::to_string(waiting_.size()) + " waiting sequences");
  return step_;
}

// Prompts never delay a decoding sequence. Retraction shortens running_, usually at its end.
void Scheduler::begin_step(bool admits) {
  step_.clear();
  const int64_t retracted_before = num_retracted_;
  for (auto& sequence : running_) sequence->kv.num_rows = 0;
  logit_rows_left_ = limits_.max_running_requests;
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.num_pending() != 1 || !sequence.wants_rows()) continue;
    const int64_t before = num_retracted_;
    if (!grow_or_retract(sequence, sequence.num_tokens_at_most())) continue;
    if (num_retracted_ != before)
      i = static_cast<size_t>(std::ranges::find(running_, &sequence, &std::unique_ptr<Sequence>::get) -
                              running_.begin());
    sequence.kv.num_rows = 1;
    --logit_rows_left_;
  }
  admits_ = num_retracted_ == retracted_before;
  FP4MOE_CHECK(admits || admits_, "a sequence was retracted while its step is in flight");
  if (running_.empty()) new_token_ratio_.reset();
  while (admits) {
    const auto next = std::ranges::find_if(waiting_, may_start);
    if (next == waiting_.end()) return;
    while (!has_room(**next))
      if (!yield_place()) return;
    const auto place = std::ranges::find_if(waiting_, may_start);  // a retracted sequence is put in front
    admit(*place);
    waiting_.erase(place);
  }
}

// ---- admission ------------------------------------------------------------------------------------

bool Scheduler::can_admit(const Sequence& sequence) const {
  return std::ranges::none_of(waiting_, may_start) && has_room(sequence);
}

// Calls each(other) for the running sequences and the reservations.
template <class Each>
void Scheduler::for_others_placed(const Sequence& sequence, const Each& each) const {
  for (const auto& other : running_)
    if (other.get() != &sequence) each(*other);
  for (const Sequence* other : reserved_)
    if (other != &sequence) each(*other);
}

bool Scheduler::has_room(const Sequence& sequence) const {
  if (!admits_ || num_placed() >= limits_.max_running_requests) return false;
  if (pages_.states().has_states() && pages_.states().num_available() == 0) return false;
  const PagePool::Prefix prefix = find_prefix(sequence);
  if (window_room(sequence) < window_need(sequence)) return false;
  const int64_t num_pages = pages_.pages_for(sequence.num_tokens());
  const int64_t num_left = pages_.num_available() - prefix.num_cached - (num_pages - prefix.num_pages);
  if (num_placed() == 0) return num_left >= 0;
  int64_t num_expected = expected_growth(sequence, num_pages);
  for_others_placed(sequence, [&](const Sequence& other) {
    num_expected += expected_growth(other, std::ssize(other.kv.tables.full));
  });
  return num_left >= std::max(num_expected, num_placed());
}

// Returns the number of additional pages that a sequence with num_pages pages is expected to need.
int64_t Scheduler::expected_growth(const Sequence& sequence, int64_t num_pages) const {
  const int64_t more = new_token_ratio_.expected_tokens(sequence.max_tokens - sequence.num_tokens());
  return std::max<int64_t>(0, pages_.pages_for(sequence.num_tokens() + more) - num_pages);
}

// Returns the most window pages that the sequence has during decode.
int64_t Scheduler::window_need(const Sequence& sequence) const {
  if (!window_is_scarce()) return 0;
  return std::min(pages_.window().most_pages(1), pages_.pages_for(sequence.max_tokens));
}

// Returns the number of available window pages that the other running sequences will not need in decode. For
// every running sequence it is at least what the sequence itself still needs: admission ensures this, and a
// shared page counts as many times as it has users, because each of them leaves it at a different time.
int64_t Scheduler::window_room(const Sequence& sequence) const {
  if (!window_is_scarce()) return 0;
  const PageReferences& references = pages_.window_pages().references();
  int64_t num_left = pages_.window_pages().num_available();
  num_left -= references.num_references() - references.num_used();
  for_others_placed(sequence, [&](const Sequence& other) {
    num_left -= std::max<int64_t>(0, window_need(other) - other.kv.tables.num_window_pages());
  });
  return num_left;
}

void Scheduler::admit(std::unique_ptr<Sequence>& sequence) {
  take_pages(*sequence);
  sequence->kv.num_rows = sequence->num_pending() == 1 && sequence->wants_rows() ? 1 : 0;
  if (sequence->kv.num_rows > 0)
    FP4MOE_CHECK(pages_.grow_window(sequence->kv.tables, sequence->num_tokens()),
                 "available window pages were miscounted");
  logit_rows_left_ -= sequence->kv.num_rows;
  running_.push_back(std::move(sequence));
}

void Scheduler::take_pages(Sequence& sequence) {
  take_prefix(sequence);
  if (!sequence.disagg.awaits_pages) return;
  pages_.leave_window(sequence.kv.tables, sequence.num_prompt_tokens);
  FP4MOE_CHECK(pages_.grow_window(sequence.kv.tables, sequence.num_prompt_tokens),
               "available window pages were miscounted");
}

// ---- retraction -----------------------------------------------------------------------------------

// Makes room for num_tokens tokens of `sequence` by giving back reservations, then by retracting first
// yielding sequences, then the most recently admitted ones. Returns false if it had to retract `sequence`
// itself.
bool Scheduler::grow_or_retract(Sequence& sequence, int64_t num_tokens) {
  while (!pages_.grow(sequence.kv.tables, num_tokens) ||
         !pages_.grow_window(sequence.kv.tables, num_tokens)) {
    if (give_back_reserved() || retract_yielding()) continue;
    const bool was_itself = running_.back().get() == &sequence;
    retract_last();
    if (was_itself) return false;
  }
  return true;
}

void Scheduler::retract_last() {
  FP4MOE_CHECK(running_.size() > 1,
               "the oldest sequence has " + std::to_string(running_.front()->kv.tables.full.size()) + " of " +
                   std::to_string(pages_.num_pages()) + " pages, " +
                   std::to_string(running_.front()->kv.tables.num_window_pages()) + " of " +
                   std::to_string(pages_.num_window_pages()) + " window pages, and needs more");
  int64_t num_tokens = 0, num_at_most = 0;
  for (const auto& sequence : running_) {
    num_tokens += sequence->num_tokens() - sequence->num_prompt_tokens;
    num_at_most += sequence->max_tokens - sequence->num_prompt_tokens;
  }
  new_token_ratio_.learn(num_running(), num_tokens, num_at_most);
  retract(running_.size() - 1);
}

bool Scheduler::retract_yielding() {
  const auto yields = [](const std::unique_ptr<Sequence>& sequence) { return sequence->yields(); };
  const auto last = std::find_if(running_.rbegin(), running_.rend(), yields);
  if (last == running_.rend()) return false;
  retract(static_cast<size_t>(running_.rend() - last) - 1);
  return true;
}

void Scheduler::retract(size_t index) {
  waiting_.push_front(std::move(running_[index]));
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  waiting_.front()->disagg.awaits_pages = false;
  give_back_pages(*waiting_.front());
  ++num_retracted_;
}

void Scheduler::retract(const Sequence& sequence) {
  const auto it = std::ranges::find(running_, &sequence, &std::unique_ptr<Sequence>::get);
  if (it != running_.end()) retract(static_cast<size_t>(it - running_.begin()));
}

// ---- rows of prompts ------------------------------------------------------------------------------

void Scheduler::finish_step() {
  std::vector<Sequence*> rest = prompts();
  if (!rest.empty()) {
    Sequence& oldest = *rest.front();
    rest.erase(rest.begin());
    int64_t left = limits_.max_prefill_tokens;
    int64_t num_behind = std::ssize(rest);
    left -= add_rows(oldest, rest.empty() ? left : left - left / 2, num_behind);
    std::ranges::stable_sort(rest, {}, [](const Sequence* s) { return s->num_pending(); });
    for (Sequence* sequence : rest) left -= add_rows(*sequence, left, --num_behind);
    add_rows(oldest, left, 0);
  }
  bool decodes = false;
  for (const auto& sequence : running_) {
    if (sequence->kv.num_rows == 0) continue;
    decodes = decodes || sequence->num_pending() == 1;
    if (!sequence->has_started()) sequence->kv.num_reused = sequence->kv.num_cached;
    step_.push_back({sequence.get(), sequence->kv.num_rows, add_drafts(*sequence)});
  }
  if (decodes) new_token_ratio_.decay();
}

// Returns the running sequences that have several tokens to compute and should not wait for an older
// sequence's pages.
std::vector<Sequence*> Scheduler::prompts() const {
  std::vector<Sequence*> found;
  for (size_t i = 0; i < running_.size(); ++i)
    if (running_[i]->kv.num_rows == 0 && running_[i]->wants_rows() && !is_being_computed(i))
      found.push_back(running_[i].get());
  return found;
}

// Returns whether an older sequence is about to compute most of what this one still has to compute.
bool Scheduler::is_being_computed(size_t index) const {
  const Sequence& sequence = *running_[index];
  if (!limits_.reuses_prefixes || sequence.has_started()) return false;
  const std::span<const int32_t> tokens = reusable_tokens(sequence);
  const int64_t page_size = pages_.page_size();
  const auto has_it_coming = [&](const std::unique_ptr<Sequence>& other) {
    if (other->kv.num_cached >= other->num_prompt_tokens || other->grammar.awaits_mask) return false;
    const auto prompt = std::span(other->token_ids).first(static_cast<size_t>(other->num_prompt_tokens));
    const int64_t num_common = std::ranges::mismatch(tokens, prompt).in1 - tokens.begin();
    const int64_t num_there = std::max(sequence.kv.num_cached, other->kv.num_cached / page_size * page_size);
    int64_t end = num_common / page_size * page_size;
    if (pages_.states().has_states()) {  // only a snapshot that the other sequence will take helps
      if (other->disagg.awaits_pages) return false;
      const int64_t cut = next_cut(*other, other->kv.num_cached);
      end = cut <= end ? cut : 0;
    }
    const int64_t num_coming = end - num_there;
    return 2 * num_coming > sequence.num_tokens() - num_there;
  };
  const auto end = running_.begin() + static_cast<std::ptrdiff_t>(index);
  return std::any_of(running_.begin(), end, has_it_coming);
}

// Adds at most `most` rows to the sequence's rows in this step; returns how many:
//
//   token_ids  | cached | in this step | added here | later steps |
//              0        kv.num_cached  + kv.num_rows               num_tokens()
//
// A step has at most limits_.max_running_requests logit rows. One is reserved for each of the num_behind
// prompts that come later in this step, so a prompt whose tokens are scored gets fewer rows if it would need
// more logit rows than are left.
int64_t Scheduler::add_rows(Sequence& sequence, int64_t most, int64_t num_behind) {
  if (most > 0) take_newer_prefix(sequence);
  const int64_t num_before = sequence.kv.num_rows;
  const auto num_logit_rows_of = [&](int64_t num_added) {
    return sequence.num_logit_rows(num_before + num_added) - sequence.num_logit_rows(num_before);
  };
  int64_t num_added =
      std::min({sequence.num_pending() - num_before, limits_.chunked_prefill_size - num_before, most});
  if (pages_.states().has_states() && limits_.reuses_prefixes) {
    const int64_t first = sequence.kv.num_cached + num_before;
    num_added = std::min(num_added, next_cut(sequence, sequence.kv.num_cached) - first);
  }
  if (window_is_scarce()) {
    const int64_t num_pages = std::ssize(sequence.kv.tables.window) + window_room(sequence);
    num_added = std::min(num_added, num_pages * pages_.page_size() - sequence.kv.num_cached - num_before);
  }
  while (num_added > 0 && num_logit_rows_of(num_added) > logit_rows_left_ - num_behind) --num_added;
  if (num_added <= 0) return 0;
  FP4MOE_CHECK(pages_.grow_window(sequence.kv.tables, sequence.kv.num_cached + num_before + num_added),
               "available window pages were miscounted");
  logit_rows_left_ -= num_logit_rows_of(num_added);
  sequence.kv.num_rows += num_added;
  return num_added;
}

// Adds rows for the sequence's draft tokens if it decodes; returns how many. The last token of the output
// needs no row.
int64_t Scheduler::add_drafts(Sequence& sequence) {
  if (sequence.draft.ids.empty() || sequence.num_pending() != 1 || sequence.kv.num_rows != 1) return 0;
  const PageTables& tables = sequence.kv.tables;
  int64_t num_added =
      std::min(std::ssize(sequence.draft.ids), sequence.max_tokens - sequence.num_tokens_at_most() - 1);
  const auto fit_pages = [&](int64_t num_pages) {
    num_added = std::min(num_added, num_pages * pages_.page_size() - sequence.num_tokens_at_most());
  };
  num_added = std::min(num_added, end_of_drafts(sequence) - sequence.num_tokens());
  fit_pages(std::ssize(tables.full) + num_spare_pages());
  if (window_is_scarce()) fit_pages(std::ssize(tables.window) + window_room(sequence));
  if (num_added <= 0) return 0;
  const int64_t num_tokens = sequence.num_tokens_at_most() + num_added;
  FP4MOE_CHECK(
      pages_.grow(sequence.kv.tables, num_tokens) && pages_.grow_window(sequence.kv.tables, num_tokens),
      "available pages were miscounted");
  return num_added;
}

int64_t Scheduler::grow_for_drafts(Sequence& sequence, int64_t num_tokens) {
  PageTables& tables = sequence.kv.tables;
  const int64_t most = (std::ssize(tables.full) + num_spare_pages()) * pages_.page_size();
  num_tokens = std::min(num_tokens, most);
  FP4MOE_CHECK(pages_.grow(tables, num_tokens), "available pages were miscounted");
  return num_tokens;
}

// If the sequence has had no rows so far, starts it over with the pages published since its admission.
void Scheduler::take_newer_prefix(Sequence& sequence) {
  if (sequence.kv.num_rows > 0 || sequence.has_started() ||
      num_reusable_pages(sequence) <= sequence.kv.num_published_pages)
    return;
  give_back_pages(sequence);
  take_prefix(sequence);
}

void Scheduler::commit_step() {
  for (const ScheduledRows& rows : step_) {
    rows.sequence->kv.num_replayed = 0;
    commit_rows(*rows.sequence, rows.num_rows);
  }
  step_.clear();
  for (size_t i = running_.size(); i-- > 0;)
    if (running_[i]->kv.is_ahead) retract(i);
}

void Scheduler::commit_rows(Sequence& sequence, int64_t num_rows) {
  sequence.kv.num_cached += num_rows;
  publish_prefix(sequence);
  take_snapshot(sequence);
  if (pages_.has_window()) pages_.leave_window(sequence.kv.tables, sequence.kv.num_cached);
}

void Scheduler::keep_draft_row(Sequence& sequence) {
  sequence.kv.num_replayed += sequence.kv.slot != 0;
  commit_rows(sequence, 1);
}

void Scheduler::drop_last_row(const Sequence& sequence) {
  const auto rows = std::ranges::find(step_, &sequence, &ScheduledRows::sequence);
  FP4MOE_CHECK(rows != step_.end() && rows->num_rows > 0, "sequence " + sequence.id + " has no rows");
  --rows->num_rows;
  rows->sequence->kv.is_ahead = rows->sequence->kv.slot != 0;
}

bool Scheduler::is_waiting() const {
  return !held_.empty() || std::ranges::any_of(running_, [](const auto& s) { return !s->wants_rows(); }) ||
         !std::ranges::all_of(waiting_, may_start);
}

bool Scheduler::hold(const Sequence& sequence) {
  const auto it = std::ranges::find(running_, &sequence, &std::unique_ptr<Sequence>::get);
  if (it == running_.end()) return false;
  held_.push_back(std::move(*it));
  running_.erase(it);
  return true;
}

// ---- pages ----------------------------------------------------------------------------------------

// Returns all tokens before the first token whose row needs logits; the last token's row always needs them,
// unless another engine computes the prompt.
std::span<const int32_t> Scheduler::reusable_tokens(const Sequence& sequence) const {
  if (!limits_.reuses_prefixes) return {};
  if (sequence.disagg.awaits_pages)
    return std::span(sequence.token_ids).first(static_cast<size_t>(sequence.num_prompt_tokens));
  const bool scores = sequence.scores.next < sequence.scores.end;
  const int64_t num_tokens = scores ? sequence.scores.next - 1 : sequence.num_tokens() - 1;
  return std::span(sequence.token_ids).first(static_cast<size_t>(num_tokens));
}

PagePool::Prefix Scheduler::find_prefix(const Sequence& sequence) const {
  return pages_.find_prefix(reusable_tokens(sequence), /*needs_snapshot=*/!sequence.disagg.awaits_pages);
}

int64_t Scheduler::num_reusable_pages(const Sequence& sequence) const {
  return find_prefix(sequence).num_pages;
}

// Allocates full pages for all tokens of the sequence, using published pages first. Admission has checked
// that enough pages are available.
void Scheduler::take_prefix(Sequence& sequence) {
  const int64_t num_matched = pages_.states().has_states() ? find_prefix(sequence).num_matched : 0;
  pages_.take_prefix(reusable_tokens(sequence), sequence.kv.tables,
                     /*needs_snapshot=*/!sequence.disagg.awaits_pages);
  sequence.kv.num_published_pages = std::ssize(sequence.kv.tables.full);
  sequence.kv.num_cached = sequence.kv.num_published_pages * pages_.page_size();
  if (pages_.states().has_states()) start_state(sequence, num_matched);
  sequence.draft.num_cached = sequence.kv.num_cached;  // the pages hold the draft model's part too
  FP4MOE_CHECK(pages_.grow(sequence.kv.tables, sequence.num_tokens()), "available pages were miscounted");
}

// Publishes pages of known tokens only: a token that a step in flight chooses is not known yet, even if its
// key and value are about to be written.
void Scheduler::publish_prefix(Sequence& sequence) {
  if (!limits_.reuses_prefixes) return;
  const int64_t num_tokens = std::min(sequence.kv.num_cached, sequence.num_known_tokens());
  if (num_tokens / pages_.page_size() == sequence.kv.num_published_pages) return;
  sequence.kv.num_published_pages =
      pages_.publish_prefix(std::span(sequence.token_ids).first(static_cast<size_t>(num_tokens)),
                            sequence.kv.tables, sequence.kv.num_published_pages);
}

void Scheduler::give_back_pages(Sequence& sequence) {
  if (std::shared_ptr<KvLease>& lease = sequence.disagg.lease; sequence.disagg.on_held && lease != nullptr)
    lease->withdraw();  // Delivery::end() ends it
  else if (lease != nullptr)
    std::exchange(lease, nullptr)->end();
  pages_.release(sequence.kv.tables);
  if (const int32_t slot = std::exchange(sequence.kv.slot, 0); slot != 0) pages_.states().release(slot);
  sequence.kv.num_snapshot_tokens = sequence.kv.branch = 0;
  sequence.kv.num_replayed = 0;
  sequence.kv.is_ahead = false;
  sequence.kv.num_cached = sequence.kv.num_published_pages = 0;
  sequence.draft.ids.clear();
  sequence.draft.num_cached = sequence.draft.num_chained = 0;
}

int64_t Scheduler::num_leaked_pages() const {
  int64_t num_references = pages_.num_references();
  int64_t num_window_references = pages_.window_pages().references().num_references();
  int64_t num_slots = pages_.states().num_used();
  const auto count = [&](const Sequence& sequence) {
    num_references -= std::ssize(sequence.kv.tables.full);
    num_window_references -= sequence.kv.tables.num_window_pages();
    num_slots -= sequence.kv.slot != 0;
  };
  for (const auto* sequences : {&running_, &held_})
    for (const auto& sequence : *sequences) count(*sequence);
  for (const Sequence* sequence : reserved_) count(*sequence);
  const int64_t num_stateless = pages_.num_pages() - pages_.num_available() - pages_.num_used();
  const int64_t num_window_stateless =
      pages_.num_window_pages() - pages_.window_pages().num_available() - pages_.num_window_used();
  return std::abs(num_references) + std::abs(num_stateless) + std::abs(num_window_references) +
         std::abs(num_window_stateless) + std::abs(num_slots);
}

// ---- lookup and removal ---------------------------------------------------------------------------

namespace {

auto find_in(auto& sequences, std::string_view id) {
  return std::find_if(sequences.begin(), sequences.end(), [&](const auto& s) { return s->id == id; });
}

std::unique_ptr<Sequence> take_from(auto& sequences, std::string_view id) {
  const auto it = find_in(sequences, id);
  if (it == sequences.end()) return nullptr;
  std::unique_ptr<Sequence> sequence = std::move(*it);
  sequences.erase(it);
  return sequence;
}

}  // namespace

std::unique_ptr<Sequence> Scheduler::remove(std::string_view id, bool failed) {
  std::unique_ptr<Sequence> sequence = take_from(running_, id);
  if (!sequence) sequence = take_from(held_, id);
  if (!sequence) return take_from(waiting_, id);
  if (failed)
    pages_.forget(sequence->kv.tables);
  else
    leave_prefix(*sequence);
  give_back_pages(*sequence);
  return sequence;
}

Sequence* Scheduler::find(std::string_view id) const {
  for (const auto* sequences : {&running_, &held_})
    if (const auto it = find_in(*sequences, id); it != sequences->end()) return it->get();
  const auto it = find_in(waiting_, id);
  return it == waiting_.end() ? nullptr : it->get();
}

Sequence* Scheduler::first() const {
  if (!running_.empty()) return running_.front().get();
  if (!waiting_.empty()) return waiting_.front().get();
  return held_.empty() ? nullptr : held_.front().get();
}

void Scheduler::list(std::vector<Sequence*>& sequences) const {
  for (const auto& sequence : running_) sequences.push_back(sequence.get());
  for (const auto& sequence : waiting_) sequences.push_back(sequence.get());
  for (const auto& sequence : held_) sequences.push_back(sequence.get());
}

}  // namespace fp4moe
