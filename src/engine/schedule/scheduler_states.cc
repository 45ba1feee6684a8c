// Scheduler: the states of sequences and their snapshots.
#include <algorithm>
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

// Without a snapshot to take, the end of the sequence.
int64_t Scheduler::next_cut(const Sequence& sequence, int64_t position) const {
  const SequenceKv& kv = sequence.kv;
  const int64_t boundary = last_boundary(sequence), page_size = pages_.page_size();
  const int64_t interval = std::max(limits_.state_interval / page_size, int64_t{1}) * page_size;
  const int64_t due = kv.num_snapshot_tokens / page_size * page_size + interval;
  int64_t cut = sequence.num_tokens();
  for (const int64_t end : {kv.branch, boundary, due})
    if (end > position) cut = std::min(cut, end);
  return cut;
}

// Whether the slot has the state at the end of the last published page.
bool Scheduler::is_at_boundary(const Sequence& sequence) const {
  const SequenceKv& kv = sequence.kv;
  return limits_.reuses_prefixes && kv.slot != 0 && !kv.is_ahead && kv.num_cached > 0 &&
         kv.num_cached == kv.num_published_pages * pages_.page_size();
}

void Scheduler::take_snapshot(Sequence& sequence) {
  SequenceKv& kv = sequence.kv;
  if (!is_at_boundary(sequence)) return;
  const bool is_due = kv.num_cached - kv.num_snapshot_tokens >= limits_.state_interval;
  if (!is_due && kv.num_cached != kv.branch && kv.num_cached != last_boundary(sequence)) return;
  const int32_t node = kv.tables.full[static_cast<size_t>(kv.num_published_pages) - 1];
  if (pages_.states().take_snapshot(kv.slot, node) || pages_.states().has_snapshot(node))
    kv.num_snapshot_tokens = kv.num_cached;
}

// Publishes what a sequence that ends leaves to others.
void Scheduler::leave_prefix(Sequence& sequence) {
  publish_prefix(sequence);
  SequenceKv& kv = sequence.kv;
  if (!is_at_boundary(sequence)) return;
  const int32_t node = kv.tables.full[static_cast<size_t>(kv.num_published_pages) - 1];
  pages_.states().leave_snapshot(std::exchange(kv.slot, 0), node);
}

void Scheduler::drop_snapshots() {
  pages_.states().drop_all_snapshots();
  pages_.states().take_copies();
}

}  // namespace fp4moe
