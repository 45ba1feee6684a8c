// Scheduler: continuous batching. Decides which rows of which sequences the next step runs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/page_pool.h"
#include "engine/sequence.h"

namespace fp4moe {

struct SchedulerLimits {
  int64_t max_running_requests = 0;
  int64_t chunked_prefill_size = 0;  // most rows of one sequence in a step
  int64_t max_prefill_tokens = 0;    // most rows in a step, besides one for each decoding sequence
};

// The sequence's next num_rows tokens after num_cached. If they reach its last token, its logits are wanted.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int64_t num_rows = 0;
  bool reaches_end() const { return sequence->num_cached + num_rows == sequence->num_tokens(); }
};

// A sequence that waits has no pages; one that runs has pages for num_cached tokens and for its rows in
// the step. Prefill and decode are one thing: rows from num_cached to the end of token_ids.
//
// First come, first served. A sequence is admitted when all its present tokens fit in free pages and one
// page is left for each that runs already; it grows page by page. When the pool is exhausted, the sequence
// admitted last gives its pages back and waits at the head of the queue, to be computed again from its
// tokens (the same bits, as every op is batch-invariant). The oldest is never sent back by another one and
// fits the pool alone, which was checked at submit: so it always ends, and there is no deadlock.
//
// Single-threaded.
class Scheduler {
 public:
  Scheduler(const SchedulerLimits& limits, int64_t num_pages, int page_size);
  ~Scheduler();

  void enqueue(std::unique_ptr<Sequence> sequence);
  // The next step, oldest sequence first; empty iff nothing waits or runs, or is_waiting(). Valid until the
  // next call.
  const std::vector<ScheduledRows>& plan_step();
  // plan_step() in pieces, for who keeps a queue of their own: rows of what runs and waits here; then whether
  // `sequence` would be admitted to this step at once, and its admission, which takes it over.
  void begin_step();
  bool can_admit(const Sequence& sequence) const;
  void admit(std::unique_ptr<Sequence>& sequence);
  const std::vector<ScheduledRows>& step() const { return step_; }
  // Marks the step's rows as cached. Called after the forward pass, before tokens are appended.
  void commit_step();
  // Whether a sequence that runs has no rows until its last token is known.
  bool is_waiting() const;
  // Takes a sequence out, wherever it is, and gives its pages back. Null if there is none.
  std::unique_ptr<Sequence> remove(std::string_view id);
  // Null if there is none.
  Sequence* find(std::string_view id) const;
  // The oldest one that runs, else the oldest that waits, else null.
  Sequence* first() const;

  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_retracted() const { return num_retracted_; }
  const PagePool& pages() const { return pages_; }

 private:
  void schedule_running();
  bool has_room(const Sequence& sequence) const;
  bool grow_or_retract(Sequence& sequence, int64_t num_tokens);
  void retract_last();
  void add_rows(Sequence& sequence);
  int64_t rows_for(const Sequence& sequence) const;

  SchedulerLimits limits_;
  PagePool pages_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  // in the order of admission
  std::vector<ScheduledRows> step_;
  int64_t prefill_left_ = 0;  // of max_prefill_tokens in this step
  bool admits_ = false;       // nothing was retracted in this step
  int64_t num_retracted_ = 0;
};

}  // namespace fp4moe
