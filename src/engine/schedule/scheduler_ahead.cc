// Scheduler: the step after one whose drafts the executor accepts, planned while that one is in flight.
#include <algorithm>

#include "base/check.h"
#include "engine/schedule/scheduler.h"

namespace fp4moe {

// Counts the pages that the sequences have besides those that they need: full ones, and window ones without
// those that the sequences need in decode.
bool Scheduler::can_plan_ahead() const {
  if (pages_.states().has_states()) return false;
  const PageReferences& references = pages_.window_pages().references();
  int64_t num_full = pages_.num_available();
  int64_t num_window = pages_.window_pages().num_available();
  num_window -= references.num_references() - references.num_used();
  for (const auto& sequence : running_) {
    const PageTables& tables = sequence->kv.tables;
    int64_t num_window_more = window_need(*sequence) - tables.num_window_pages();
    if (sequence->wants_rows()) {
      if (sequence->num_pending() != 1 || !sequence->allows_unknown_drafts()) return false;
      const int64_t num_pages = pages_.pages_for(sequence->num_tokens_at_most());
      num_full -= std::max<int64_t>(0, num_pages - std::ssize(tables.full));
      num_window_more = std::max(num_window_more, num_pages - std::ssize(tables.window));
    }
    num_window -= std::max<int64_t>(0, num_window_more);
  }
  return num_full >= 0 && (!window_is_scarce() || num_window >= 0);
}

void Scheduler::reserve_ahead() {
  for (const auto& sequence : running_) {
    if (!sequence->wants_rows()) continue;
    PageTables& tables = sequence->kv.tables;
    const int64_t num_tokens = sequence->num_tokens_at_most();
    FP4MOE_CHECK(pages_.grow(tables, num_tokens) && pages_.grow_window(tables, num_tokens),
                 "available pages were miscounted");
  }
}

bool Scheduler::is_about_to_admit() const {
  const auto next = std::ranges::find_if(waiting_, may_start);
  return next != waiting_.end() && (has_room(**next) || (admits_ && has_yielding()));
}

}  // namespace fp4moe
