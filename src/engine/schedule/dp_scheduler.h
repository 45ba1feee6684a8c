// DpScheduler: one queue in front of the schedulers of all data-parallel groups.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/schedule/scheduler.h"

namespace fp4moe {

// Returns the limits for each of `num_groups` groups: an equal share of every number, rounded up, so that a
// step over all groups is about as large as a step of a single group would be.
SchedulerLimits group_limits(const SchedulerLimits& limits, int num_groups);

// The queue is ordered by priority, then by arrival, over all groups. The request at its head is admitted to
// the group that has room and runs the fewest requests; in a tie, to the group with the fewest used KV pages,
// then to the lowest-numbered group. A group whose pages hold more of the prompt's prefix is preferred if it
// runs at most one request more than the other group. A request stays in its group even if it is retracted.
// With one group, this class works like Scheduler, but with priorities.
//
// Large because it has the interface of Scheduler over all groups; most methods are one-line sums.
//
// Single-threaded.
class DpScheduler {
 public:
  // `limits` and `pool` are per group.
  DpScheduler(int num_groups, const SchedulerLimits& limits, const PoolShape& pool);

  // Queues the sequence; if it has reserved pages, it runs at once in their group.
  void enqueue(std::unique_ptr<Sequence> sequence);
  // Gives a sequence that is not enqueued yet a place and pages in a group (Scheduler::reserve()). Returns
  // false if it would have to wait for them. It must then be enqueued, unless its pages have been given back.
  bool reserve(Sequence& sequence);
  // Plans the next step: each group's rows, oldest sequence first. Returns false if no group has rows (see
  // Scheduler::plan_step()). Groups without work have no rows.
  bool plan_step(bool admits = true);
  // Prepares a step that plan_step(false) plans while a step with drafts is in flight. Returns false and
  // changes nothing if a group cannot do so (Scheduler::can_plan_ahead()) or could admit a sequence, or if
  // the step would have no rows.
  bool reserve_ahead();
  std::span<const ScheduledRows> step(int group) const { return groups_[static_cast<size_t>(group)]->step(); }
  // The same as in Scheduler.
  void commit_step();
  void keep_draft_row(Sequence& sequence);
  int64_t grow_for_drafts(Sequence& sequence, int64_t num_tokens);
  void drop_last_row(const Sequence& sequence);
  void retract(const Sequence& sequence);
  std::unique_ptr<Sequence> remove(std::string_view id, bool failed = false);
  void flush();
  void drop_snapshots();
  std::vector<StateCopy> take_state_copies(int group) {
    return groups_[static_cast<size_t>(group)]->take_state_copies();
  }
  Sequence* find(std::string_view id) const;
  bool hold(const Sequence& sequence);
  // Returns a running sequence if there is one, otherwise any other sequence, otherwise null.
  Sequence* first() const;
  void list(std::vector<Sequence*>& sequences) const;

  int num_groups() const { return static_cast<int>(groups_.size()); }
  int64_t num_running() const;
  int64_t num_waiting() const;
  int64_t num_held() const { return sum(&Scheduler::num_held); }
  int64_t num_reserved() const { return sum(&Scheduler::num_reserved); }
  int64_t num_retracted() const;
  double new_token_ratio() const;  // mean over the groups
  // Sums over all groups' pools.
  int64_t num_pages() const { return sum(&PagePool::num_pages); }
  int64_t num_free_pages() const { return sum(&PagePool::num_free); }
  int64_t num_cached_pages() const { return sum(&PagePool::num_cached); }
  int64_t num_used_pages() const { return sum(&PagePool::num_used); }
  int64_t num_window_pages() const { return sum(&PagePool::num_window_pages); }
  int64_t num_free_window_pages() const { return sum(&PagePool::num_window_free); }
  int64_t num_cached_window_pages() const { return sum(&PagePool::num_window_cached); }
  int64_t num_used_window_pages() const { return sum(&PagePool::num_window_used); }
  int64_t num_leaked_pages() const { return sum(&Scheduler::num_leaked_pages); }
  int64_t num_slots() const { return sum(&StatePool::num_slots); }
  int64_t num_used_slots() const { return sum(&StatePool::num_used); }
  int64_t num_snapshots() const { return sum(&StatePool::num_snapshots); }

 private:
  // The first waiting sequence whose mask is ready, or waiting_.end().
  std::deque<std::unique_ptr<Sequence>>::iterator next_waiting();
  Scheduler* choose_group(const Sequence& sequence) const;
  bool yield_place();
  int index_of(const Scheduler& group) const;
  int64_t sum(int64_t (Scheduler::*number)() const) const;
  int64_t sum(int64_t (PagePool::*number)() const) const;
  int64_t sum(int64_t (StatePool::*number)() const) const;

  std::vector<std::unique_ptr<Scheduler>> groups_;
  std::deque<std::unique_ptr<Sequence>> waiting_;  // not yet assigned to a group
};

}  // namespace fp4moe
