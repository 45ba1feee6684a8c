// Scheduler: continuous batching. Decides which rows of which sequences the next step runs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/new_token_ratio.h"
#include "engine/page_pool.h"
#include "engine/sequence.h"

namespace fp4moe {

struct SchedulerLimits {
  int64_t max_running_requests = 0;  // and rows of logits in a step
  int64_t chunked_prefill_size = 0;  // most rows of one sequence in a step
  int64_t max_prefill_tokens = 0;    // most rows in a step, besides one for each decoding sequence
  bool reuses_prefixes = false;      // pages of past requests serve the next one that begins alike
  double conservativeness = 1;       // of admission, see NewTokenRatio
};

// The sequence's next num_rows tokens after num_cached. If they reach its last token, its logits are wanted.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int64_t num_rows = 0;
  bool reaches_end() const { return sequence->num_cached + num_rows == sequence->num_tokens(); }
};

// A sequence that waits has no pages; one that runs has pages for all its tokens. Prefill and decode are one
// thing: rows from num_cached to the end of token_ids.
//
// Admission is first come, first served: all present tokens must fit in available pages, and what the running
// sequences are expected to need still must be left (NewTokenRatio), at least a page for each. A sequence
// grows page by page. When the pool is exhausted, the sequence admitted last gives its pages back and waits
// at the head of the queue, to be computed again from its tokens (the same bits, as every op is
// batch-invariant). The oldest is never sent back by another one and fits the pool alone, which was checked
// at submit: so it always ends, and there is no deadlock.
//
// Every step has the next row of each sequence that decodes. Of the rows for prompts the oldest prompt has
// half, the other half goes to the shortest ones first: a long prompt neither waits for short ones nor holds
// them up.
//
// Where prefixes are reused, a sequence starts with the pages that hold the beginning of its tokens, whoever
// computed them; a page that is full becomes known when its step is committed. One that begins like an older
// one whose prompt is being computed gets no rows before that one's pages are known, if they are most of what
// it has to compute.
//
// One whose prompt another engine computes (awaits_pages) is admitted as any other, and has no rows until the
// prompt's pages are filled; if it is retracted before or after, it is computed here. One that is held has no
// rows any more, counts as neither running nor waiting, and keeps its pages until it is removed. One that
// awaits the mask of its grammar (awaits_mask) keeps its place and its pages, and has no rows until then.
// If its masks are slow, it gives both up to a sequence that needs them; while it awaits its mask it is not
// admitted, nor does it hold up the ones behind it in the queue.
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
  // plan_step() in pieces, for who keeps a queue of their own: rows of what decodes, admission of what waits
  // here; then whether `sequence` would be admitted at once, and its admission, which takes it over; then the
  // rows of prompts.
  void begin_step();
  bool can_admit(const Sequence& sequence) const;
  void admit(std::unique_ptr<Sequence>& sequence);
  // Makes room for another admission: sends back the sequence that was admitted last among those that yield.
  // False if no sequence yields, or if this step admits nothing.
  bool yield_place() { return admits_ && retract_yielding(); }
  void finish_step();
  // How many pages it would start with.
  int64_t num_reusable_pages(const Sequence& sequence) const;
  const std::vector<ScheduledRows>& step() const { return step_; }
  // Marks the step's rows as cached. Called after the forward pass, before tokens are appended.
  void commit_step();
  // Before that: no token is chosen from the sequence's last row in this step; a later step computes the row
  // again.
  void drop_last_row(const Sequence& sequence);
  // Whether a sequence has no rows until something else has happened: its last token is known, its pages are
  // filled or, of one that is held, given back.
  bool is_waiting() const;
  // False, and nothing was done: it does not run.
  bool hold(const Sequence& sequence);
  // Takes a sequence out, wherever it is, and gives its pages back; of one that failed nothing is reused.
  // Null if there is none.
  std::unique_ptr<Sequence> remove(std::string_view id, bool failed = false);
  // Frees what is kept for reuse.
  void flush() { pages_.flush(); }
  // Null if there is none.
  Sequence* find(std::string_view id) const;
  // The oldest one that runs, else that waits, else that is held, else null.
  Sequence* first() const;
  // Appends all, those that run first.
  void list(std::vector<Sequence*>& sequences) const;

  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_held() const { return static_cast<int64_t>(held_.size()); }
  int64_t num_retracted() const { return num_retracted_; }
  double new_token_ratio() const { return new_token_ratio_.value(); }
  const PagePool& pages() const { return pages_; }
  // Entries of the pool's books that no sequence stands for, and pages in none of its states: a mistake of
  // ours.
  int64_t num_leaked_pages() const;

 private:
  bool has_room(const Sequence& sequence) const;
  int64_t expected_growth(const Sequence& sequence, int64_t num_pages) const;
  bool grow_or_retract(Sequence& sequence, int64_t num_tokens);
  void retract_last();
  bool retract_yielding();
  void retract(size_t index);
  std::vector<Sequence*> prompts() const;
  bool is_being_computed(size_t index) const;
  int64_t add_rows(Sequence& sequence, int64_t most, int64_t num_behind);
  std::span<const int32_t> reusable_tokens(const Sequence& sequence) const;
  void take_prefix(Sequence& sequence);
  void make_known(Sequence& sequence);
  void give_back_pages(Sequence& sequence);

  SchedulerLimits limits_;
  PagePool pages_;
  NewTokenRatio new_token_ratio_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  // in the order of admission
  std::vector<std::unique_ptr<Sequence>> held_;
  std::vector<ScheduledRows> step_;
  int64_t logit_rows_left_ = 0;  // of the step's rows of logits, as many as requests may run
  bool admits_ = false;          // nothing was retracted in this step
  int64_t num_retracted_ = 0;
};

}  // namespace fp4moe
