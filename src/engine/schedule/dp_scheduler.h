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

// Limits of each of `num_groups` groups: an equal share of every number, rounded up, so that a step over all
// groups is about as large as a step of a single group would be.
SchedulerLimits group_limits(const SchedulerLimits& limits, int num_groups);

// Ordered by priority, then first come, first served over all groups. The request at the head of the queue
// goes to the group with room that runs the fewest requests; among equals to the one with the fewest used KV
// pages, then to the lowest-numbered. A group that has more of the prompt's prefix in its pages may run one
// request more than the others. The request stays in its group, also when it is retracted. With one group
// this is the scheduler itself.
//
// Large because it has the interface of Scheduler over all groups; most methods are one-line sums.
//
// Single-threaded.
class DpScheduler {
 public:
  // `limits` and num_pages are per group.
  DpScheduler(int num_groups, const SchedulerLimits& limits, int64_t num_pages, int page_size);

  void enqueue(std::unique_ptr<Sequence> sequence);
  // Plans the next step: per group its rows, oldest sequence first. False if no group has rows, as in
  // Scheduler. Groups without work have no rows.
  bool plan_step();
  std::span<const ScheduledRows> step(int group) const { return groups_[static_cast<size_t>(group)]->step(); }
  // As in Scheduler.
  void commit_step();
  void drop_last_row(const Sequence& sequence);
  std::unique_ptr<Sequence> remove(std::string_view id, bool failed = false);
  void flush();
  Sequence* find(std::string_view id) const;
  bool hold(const Sequence& sequence);
  // A running sequence if there is one, otherwise any other, otherwise null.
  Sequence* first() const;
  void list(std::vector<Sequence*>& sequences) const;

  int num_groups() const { return static_cast<int>(groups_.size()); }
  int64_t num_running() const;
  int64_t num_waiting() const;
  int64_t num_held() const { return sum(&Scheduler::num_held); }
  int64_t num_retracted() const;
  double new_token_ratio() const;  // mean over the groups
  // Sums over all groups' pools.
  int64_t num_pages() const { return sum(&PagePool::num_pages); }
  int64_t num_free_pages() const { return sum(&PagePool::num_free); }
  int64_t num_cached_pages() const { return sum(&PagePool::num_cached); }
  int64_t num_used_pages() const { return sum(&PagePool::num_used); }
  int64_t num_leaked_pages() const { return sum(&Scheduler::num_leaked_pages); }

 private:
  Scheduler* choose_group(const Sequence& sequence) const;
  bool yield_place();
  int index_of(const Scheduler& group) const;
  int64_t sum(int64_t (Scheduler::*number)() const) const;
  int64_t sum(int64_t (PagePool::*number)() const) const;

  std::vector<std::unique_ptr<Scheduler>> groups_;
  std::deque<std::unique_ptr<Sequence>> waiting_;  // not yet assigned to a group
};

}  // namespace fp4moe
