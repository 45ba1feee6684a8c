// Scheduler: sequences that reserve pages before they are enqueued.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"
#include "engine/schedule/scheduler.h"

namespace fp4moe {

void Scheduler::reserve(Sequence& sequence) {
  take_pages(sequence);
  reserved_.push_back(&sequence);
}

void Scheduler::admit_reserved(std::unique_ptr<Sequence> sequence) {
  FP4MOE_CHECK(std::erase(reserved_, sequence.get()) == 1, "sequence " + sequence->id + " has no pages");
  running_.push_back(std::move(sequence));
}

bool Scheduler::give_back_reserved() {
  if (reserved_.empty()) return false;
  Sequence& sequence = *reserved_.back();
  reserved_.pop_back();
  sequence.disagg.awaits_pages = false;
  give_back_pages(sequence);
  return true;
}

}  // namespace fp4moe
