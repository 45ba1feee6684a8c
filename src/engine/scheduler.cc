#include "engine/scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"

namespace fp4moe {

Scheduler::Scheduler(const SchedulerLimits& limits, int64_t num_pages, int page_size)
    : limits_(limits), pages_(num_pages, page_size) {
  running_.reserve(static_cast<size_t>(limits.max_running_requests));
  step_.reserve(static_cast<size_t>(limits.max_running_requests));
}

Scheduler::~Scheduler() {
  for (auto& sequence : running_) pages_.release(sequence->page_table);
}

void Scheduler::enqueue(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }

const std::vector<ScheduledRows>& Scheduler::plan_step() {
  begin_step();
  FP4MOE_CHECK(!step_.empty() || is_waiting() || (running_.empty() && waiting_.empty()),
               "no rows for " + std::to_string(running_.size()) + " running and " +
                   std::to_string(waiting_.size()) + " waiting sequences");
  return step_;
}

void Scheduler::begin_step() {
  step_.clear();
  prefill_left_ = limits_.max_prefill_tokens;
  const int64_t retracted_before = num_retracted_;
  schedule_running();
  admits_ = num_retracted_ == retracted_before;
  while (!waiting_.empty() && has_room(*waiting_.front())) {
    admit(waiting_.front());
    waiting_.pop_front();
  }
}

bool Scheduler::is_waiting() const {
  return std::any_of(running_.begin(), running_.end(),
                     [](const auto& s) { return s->is_complete() || s->waits_for_token(); });
}

void Scheduler::commit_step() {
  for (const ScheduledRows& rows : step_) rows.sequence->num_cached += rows.num_rows;
  step_.clear();
}

// Retraction shortens running_ from its end, where no rows were scheduled yet.
void Scheduler::schedule_running() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (grow_or_retract(sequence, sequence.num_cached + rows_for(sequence))) add_rows(sequence);
  }
}

bool Scheduler::has_room(const Sequence& sequence) const {
  return admits_ && num_running() < limits_.max_running_requests && prefill_left_ > 0 &&
         pages_.num_free() - pages_.pages_for(sequence.num_tokens()) >= num_running();
}

bool Scheduler::can_admit(const Sequence& sequence) const { return waiting_.empty() && has_room(sequence); }

void Scheduler::admit(std::unique_ptr<Sequence>& sequence) {
  FP4MOE_CHECK(pages_.grow(sequence->page_table, sequence->num_tokens()), "free pages were counted");
  running_.push_back(std::move(sequence));
  add_rows(*running_.back());
}

// Makes room for num_tokens of `sequence`, at the cost of the sequences admitted last. False if that was
// this sequence itself.
bool Scheduler::grow_or_retract(Sequence& sequence, int64_t num_tokens) {
  while (!pages_.grow(sequence.page_table, num_tokens)) {
    const bool was_itself = running_.back().get() == &sequence;
    retract_last();
    if (was_itself) return false;
  }
  return true;
}

void Scheduler::retract_last() {
  FP4MOE_CHECK(running_.size() > 1, "the oldest sequence has " +
                                        std::to_string(running_.front()->page_table.size()) + " of " +
                                        std::to_string(pages_.num_pages()) + " pages and needs more");
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
  Sequence& sequence = *waiting_.front();
  pages_.release(sequence.page_table);
  sequence.num_cached = 0;
  ++num_retracted_;
}

int64_t Scheduler::rows_for(const Sequence& sequence) const {
  const int64_t num_pending = sequence.num_tokens() - sequence.num_cached;
  if (sequence.is_complete() || sequence.waits_for_token()) return 0;  // no successor, or not yet
  if (num_pending == 1) return 1;  // decode: never held up by others' prefill
  return std::min({num_pending, limits_.chunked_prefill_size, prefill_left_});
}

void Scheduler::add_rows(Sequence& sequence) {
  const int64_t num_rows = rows_for(sequence);
  if (num_rows == 0) return;
  const bool is_prefill = sequence.num_tokens() - sequence.num_cached > 1;
  if (is_prefill) prefill_left_ -= num_rows;
  step_.push_back({&sequence, num_rows});
}

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

std::unique_ptr<Sequence> Scheduler::remove(std::string_view id) {
  std::unique_ptr<Sequence> sequence = take_from(running_, id);
  if (!sequence) return take_from(waiting_, id);
  pages_.release(sequence->page_table);
  return sequence;
}

Sequence* Scheduler::find(std::string_view id) const {
  if (const auto it = find_in(running_, id); it != running_.end()) return it->get();
  const auto it = find_in(waiting_, id);
  return it == waiting_.end() ? nullptr : it->get();
}

Sequence* Scheduler::first() const {
  if (!running_.empty()) return running_.front().get();
  return waiting_.empty() ? nullptr : waiting_.front().get();
}

}  // namespace fp4moe
