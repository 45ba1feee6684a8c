// Scheduler: the states of sequences and their snapshots.
#include <algorithm>
#include <limits>
#include <utility>

#include "engine/schedule/scheduler.h"

namespace fp4moe {

// Gives the sequence a slot with the state at the end of its reused pages. If the state is to arrive from
// another engine, the slot's content is undefined, so it counts as that of no tokens.
void Scheduler::start_state(Sequence& sequence, int64_t num_matched) {
  SequenceKv& kv = sequence.kv;
  int32_t node = kv.tables.full.empty() ? StatePool::kNone : kv.tables.full.back();
  if (sequence.disagg.awaits_pages) {
    num_matched = 0;
    const bool is_whole = kv.num_cached == sequence.num_prompt_tokens;
    if (!is_whole || !pages_.states().has_snapshot(node)) {
      node = StatePool::kNone;
      kv.num_cached = 0;
    }
  }
  kv.slot = pages_.states().allocate(node);
  kv.num_snapshot_tokens = kv.num_cached;
  const int64_t branch = num_matched * pages_.page_size();
  kv.branch = branch > kv.num_cached ? branch : 0;
}

// The last page boundary of the prompt from which an equal prompt could continue.
int64_t Scheduler::last_boundary(const Sequence& sequence) const {
  return (sequence.num_prompt_tokens - 1) / pages_.page_size() * pages_.page_size();
}

int64_t Scheduler::next_due(const SequenceKv& kv) const {
  const int64_t page_size = pages_.page_size();
  const int64_t interval = std::max(limits_.state_interval / page_size, int64_t{1}) * page_size;
  return kv.num_snapshot_tokens / page_size * page_size + interval;
}

// Without a snapshot to take, the end of the sequence.
int64_t Scheduler::next_cut(const Sequence& sequence, int64_t position) const {
  const SequenceKv& kv = sequence.kv;
  int64_t cut = sequence.num_tokens();
  for (const int64_t end : {kv.branch, last_boundary(sequence), next_due(kv)})
    if (end > position) cut = std::min(cut, end);
  return cut;
}

// Drafts do not reach the token before the next boundary at which a snapshot is due, so that this token will
// be a row that is no draft: after its step the slot has the state at the boundary.
int64_t Scheduler::end_of_drafts(const Sequence& sequence) const {
  const int64_t page_size = pages_.page_size(), num_tokens = sequence.num_tokens();
  if (sequence.kv.slot == 0 || !limits_.reuses_prefixes) return std::numeric_limits<int64_t>::max();
  return std::max(next_due(sequence.kv), (num_tokens / page_size + 1) * page_size) - 1;
}

// Whether the slot has the state at the end of a published page.
bool Scheduler::is_at_boundary(const SequenceKv& kv) const {
  const int64_t page_size = pages_.page_size(), num_tokens = kv.num_state_tokens();
  return limits_.reuses_prefixes && kv.slot != 0 && !kv.is_ahead && num_tokens > 0 &&
         num_tokens % page_size == 0 && num_tokens <= kv.num_published_pages * page_size;
}

// Precondition: is_at_boundary().
int32_t Scheduler::boundary_node(const SequenceKv& kv) const {
  return kv.tables.full[static_cast<size_t>(kv.num_state_tokens() / pages_.page_size()) - 1];
}

void Scheduler::take_snapshot(Sequence& sequence) {
  SequenceKv& kv = sequence.kv;
  if (!is_at_boundary(kv)) return;
  const int64_t num_tokens = kv.num_state_tokens();
  const bool is_due = num_tokens - kv.num_snapshot_tokens >= limits_.state_interval;
  if (!is_due && num_tokens != kv.branch && num_tokens != last_boundary(sequence)) return;
  const int32_t node = boundary_node(kv);
  if (pages_.states().take_snapshot(kv.slot, node) || pages_.states().has_snapshot(node))
    kv.num_snapshot_tokens = num_tokens;
}

// Publishes what a sequence that ends leaves to others.
void Scheduler::leave_prefix(Sequence& sequence) {
  publish_prefix(sequence);
  SequenceKv& kv = sequence.kv;
  if (!is_at_boundary(kv)) return;
  const int32_t node = boundary_node(kv);
  pages_.states().leave_snapshot(std::exchange(kv.slot, 0), node);
}

void Scheduler::drop_snapshots() {
  pages_.states().drop_all_snapshots();
  pages_.states().take_copies();
}

}  // namespace fp4moe
