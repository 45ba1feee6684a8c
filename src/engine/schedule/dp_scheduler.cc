#include "engine/schedule/dp_scheduler.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace fp4moe {

SchedulerLimits group_limits(const SchedulerLimits& limits, int num_groups) {
  const auto part = [num_groups](int64_t n) { return n / num_groups + (n % num_groups != 0); };
  return {.max_running_requests = part(limits.max_running_requests),
          .chunked_prefill_size = part(limits.chunked_prefill_size),
          .max_prefill_tokens = part(limits.max_prefill_tokens),
          .reuses_prefixes = limits.reuses_prefixes,
          .conservativeness = limits.conservativeness,
          .state_interval = limits.state_interval};
}

DpScheduler::DpScheduler(int num_groups, const SchedulerLimits& limits, const PoolShape& pool) {
  FP4MOE_CHECK(num_groups >= 1, "num_groups=" + std::to_string(num_groups));
  for (int group = 0; group < num_groups; ++group)
    groups_.push_back(std::make_unique<Scheduler>(limits, pool));
}

void DpScheduler::enqueue(std::unique_ptr<Sequence> sequence) {
  if (!sequence->kv.tables.full.empty())
    return groups_[static_cast<size_t>(sequence->kv.group)]->admit_reserved(std::move(sequence));
  const auto place = std::upper_bound(
      waiting_.begin(), waiting_.end(), sequence->request.priority,
      [](int64_t priority, const auto& other) { return priority > other->request.priority; });
  waiting_.insert(place, std::move(sequence));
}

bool DpScheduler::reserve(Sequence& sequence) {
  if (next_waiting() != waiting_.end()) return false;
  Scheduler* const group = choose_group(sequence);
  if (group == nullptr) return false;
  sequence.kv.group = index_of(*group);
  group->reserve(sequence);
  return true;
}

bool DpScheduler::plan_step(bool admits) {
  for (const auto& group : groups_) group->begin_step(admits);
  while (admits) {
    const auto next = next_waiting();
    if (next == waiting_.end()) break;
    Scheduler* group = choose_group(**next);
    if (group == nullptr && yield_place()) continue;
    if (group == nullptr) break;  // later sequences do not overtake the head of the queue
    (*next)->kv.group = index_of(*group);
    group->admit(*next);
    waiting_.erase(next);
  }
  for (const auto& group : groups_) group->finish_step();
  const bool has_rows =
      std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return !g->step().empty(); });
  const bool is_waiting =
      std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return g->is_waiting(); }) ||
      std::any_of(waiting_.begin(), waiting_.end(), [](const auto& s) { return s->grammar.awaits_mask; });
  FP4MOE_CHECK(has_rows || is_waiting || first() == nullptr,
               "no rows for " + std::to_string(num_running()) + " running and " +
                   std::to_string(num_waiting()) + " waiting sequences");
  return has_rows;
}

bool DpScheduler::reserve_ahead() {
  const auto next = next_waiting();
  if (next != waiting_.end() && choose_group(**next) != nullptr) return false;
  for (const auto& group : groups_)
    if (group->is_about_to_admit() || (next != waiting_.end() && group->has_yielding()) ||
        !group->can_plan_ahead())
      return false;
  if (std::ranges::none_of(groups_, [](const auto& g) { return g->has_wanting(); })) return false;
  for (const auto& group : groups_) group->reserve_ahead();
  return true;
}

std::deque<std::unique_ptr<Sequence>>::iterator DpScheduler::next_waiting() {
  return std::ranges::find_if(waiting_, [](const auto& s) { return !s->grammar.awaits_mask; });
}

Scheduler* DpScheduler::choose_group(const Sequence& sequence) const {
  Scheduler* best = nullptr;
  int64_t best_reusable = 0;
  const auto load = [](const Scheduler& s) { return std::tuple(s.num_placed(), s.pages().num_used()); };
  for (const auto& group : groups_) {
    if (!group->can_admit(sequence)) continue;
    const int64_t reusable = group->num_reusable_pages(sequence);
    const int64_t more = best == nullptr ? 0 : group->num_placed() - best->num_placed();
    const bool is_better = best == nullptr || (reusable == best_reusable  ? load(*group) < load(*best)
                                               : reusable > best_reusable ? more <= 1
                                                                          : more < -1);
    if (!is_better) continue;
    best = group.get();
    best_reusable = reusable;
  }
  return best;
}

bool DpScheduler::yield_place() {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return g->yield_place(); });
}

int DpScheduler::index_of(const Scheduler& group) const {
  const auto found = std::ranges::find(groups_, &group, &std::unique_ptr<Scheduler>::get);
  return static_cast<int>(found - groups_.begin());
}

bool DpScheduler::hold(const Sequence& sequence) {
  return groups_[static_cast<size_t>(sequence.kv.group)]->hold(sequence);
}

void DpScheduler::commit_step() {
  for (const auto& group : groups_) group->commit_step();
}

void DpScheduler::keep_draft_row(Sequence& sequence) {
  groups_[static_cast<size_t>(sequence.kv.group)]->keep_draft_row(sequence);
}

int64_t DpScheduler::grow_for_drafts(Sequence& sequence, int64_t num_tokens) {
  return groups_[static_cast<size_t>(sequence.kv.group)]->grow_for_drafts(sequence, num_tokens);
}

void DpScheduler::drop_last_row(const Sequence& sequence) {
  groups_[static_cast<size_t>(sequence.kv.group)]->drop_last_row(sequence);
}

void DpScheduler::retract(const Sequence& sequence) {
  groups_[static_cast<size_t>(sequence.kv.group)]->retract(sequence);
}

void DpScheduler::flush() {
  for (const auto& group : groups_) group->flush();
}

void DpScheduler::drop_snapshots() {
  for (const auto& group : groups_) group->drop_snapshots();
}

std::unique_ptr<Sequence> DpScheduler::remove(std::string_view id, bool failed) {
  for (const auto& group : groups_)
    if (std::unique_ptr<Sequence> sequence = group->remove(id, failed)) return sequence;
  const auto it = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& s) { return s->id == id; });
  if (it == waiting_.end()) return nullptr;
  std::unique_ptr<Sequence> sequence = std::move(*it);
  waiting_.erase(it);
  return sequence;
}

Sequence* DpScheduler::find(std::string_view id) const {
  for (const auto& group : groups_)
    if (Sequence* sequence = group->find(id)) return sequence;
  const auto it = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& s) { return s->id == id; });
  return it == waiting_.end() ? nullptr : it->get();
}

Sequence* DpScheduler::first() const {
  for (const auto& group : groups_)
    if (group->num_running() > 0) return group->first();
  for (const auto& group : groups_)
    if (Sequence* sequence = group->first()) return sequence;
  return waiting_.empty() ? nullptr : waiting_.front().get();
}

void DpScheduler::list(std::vector<Sequence*>& sequences) const {
  for (const auto& group : groups_) group->list(sequences);
  for (const auto& sequence : waiting_) sequences.push_back(sequence.get());
}

double DpScheduler::new_token_ratio() const {
  double total = 0;
  for (const auto& group : groups_) total += group->new_token_ratio();
  return total / num_groups();
}

int64_t DpScheduler::sum(int64_t (Scheduler::*number)() const) const {
  int64_t total = 0;
  for (const auto& group : groups_) total += ((*group).*number)();
  return total;
}

int64_t DpScheduler::sum(int64_t (PagePool::*number)() const) const {
  int64_t total = 0;
  for (const auto& group : groups_) total += (group->pages().*number)();
  return total;
}

int64_t DpScheduler::sum(int64_t (StatePool::*number)() const) const {
  int64_t total = 0;
  for (const auto& group : groups_) total += (group->pages().states().*number)();
  return total;
}

int64_t DpScheduler::num_running() const { return sum(&Scheduler::num_running); }
int64_t DpScheduler::num_waiting() const {
  return sum(&Scheduler::num_waiting) + static_cast<int64_t>(waiting_.size());
}
int64_t DpScheduler::num_retracted() const { return sum(&Scheduler::num_retracted); }

}  // namespace fp4moe
