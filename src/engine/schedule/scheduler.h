// Scheduler: implements continuous batching. Chooses the sequences and rows for the next step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/schedule/new_token_ratio.h"
#include "engine/schedule/page_pool.h"
#include "engine/schedule/sequence.h"

namespace fp4moe {

struct SchedulerLimits {
  int64_t max_running_requests = 0;  // also the maximum number of logit rows in a step, besides drafts
  int64_t chunked_prefill_size = 0;  // maximum number of rows per sequence and step
  int64_t max_prefill_tokens = 0;    // maximum number of rows per step, besides those of decoding sequences:
                                     // one each, and its drafts
  bool reuses_prefixes = false;      // whether requests reuse cached pages of an equal prefix
  double conservativeness = 1;       // of admission; see NewTokenRatio
  int64_t state_interval = 256;  // most tokens between two snapshots of a sequence's state, in whole pages
};

// The sequence's next num_rows tokens after num_cached. If they include the sequence's last token, the logits
// of that token are computed. The rows of the first num_drafts tokens of draft.ids follow it, all with
// logits.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int64_t num_rows = 0;
  int64_t num_drafts = 0;
  bool reaches_end() const { return sequence->kv.num_cached + num_rows == sequence->num_tokens(); }
};

// A waiting sequence has no pages; a running one has pages for all its tokens. Prefill and decode are the
// same thing: rows from num_cached to the end of token_ids.
//
// Admission is first come, first served. It requires available pages for all present tokens of the sequence
// and for the growth expected of it and the running sequences (NewTokenRatio), at least one page for each
// running sequence. A sequence grows page by page. When the pool is exhausted, the sequence admitted last is
// retracted: it gives its pages back and waits at the head of the queue to be recomputed from its tokens
// (with identical bits, because every op is batch-invariant). The oldest sequence is never retracted in
// favour of another and fits in the pool alone, which is checked at submission, so it always ends and there
// is no deadlock.
//
// Every step contains the next row of each decoding sequence. The oldest prompt gets half of the prompt rows;
// the other half goes to the shortest prompts first. So a long prompt neither waits for short prompts nor
// delays them.
//
// With prefix reuse, a sequence starts with the pages that hold a prefix of its tokens, whichever sequence
// computed them; full pages are published when their step is committed. If an older sequence is still
// computing a prompt that shares a prefix with a new sequence, and that prefix is most of what the new
// sequence has to compute, the new sequence gets no rows until the prefix's pages are published.
//
// A decoding sequence with draft tokens gets rows for them too, as far as its pages reach or the pool has
// pages to spare; drafts retract nothing. Only rows whose draft is the chosen token count as cached
// (keep_draft_row); the others are computed again with the right tokens, in the same places.
//
// Window layers (model/kv_window.h) have separate pages. A sequence has few of them at a time, whatever its
// length: admission requires those that it and the running sequences need in decode, and the rows of a prompt
// leave as many to the other sequences. So window pages never run out in decode.
//
// A sequence of a model with states owns a slot from admission until it gives its pages back. With prefix
// reuse, the slot is copied to a snapshot where others may continue: at the last page boundary that an equal
// prompt could reuse, where the prompt leaves a cached path, and every state_interval tokens; the rows of a
// prompt end there. At the end of a request, a slot at a page boundary becomes a snapshot itself. Drafts do
// not advance a slot: those that were right are replayed by the sequence's next step (kernels/batch.h).
//
// A sequence whose prompt another engine computes (awaits_pages) is admitted like any other, but has no rows
// until the prompt's pages are filled; if it is retracted, this engine computes the prompt. Its state arrives
// with the pages, so it needs no snapshot to start with cached pages; if all pages are cached, and a snapshot
// at their end, nothing has to arrive. Before it can be enqueued, such a sequence can reserve the place and
// the pages that admission would give it now, for the pages that arrive early. Reservations never delay
// others: they are given back, the last one first, before a sequence is retracted and whenever a waiting
// sequence needs their place or pages. A held sequence has no rows, counts as neither running nor waiting,
// and keeps its pages until it is removed. A sequence that waits for its grammar's mask (awaits_mask) keeps
// its place and its pages but has no rows. If its masks are slow to compute, it yields both to a sequence
// that needs them; in the queue, it is not admitted before its mask is ready, but does not block the
// sequences behind it.
//
// Large because admission, retraction, the rows of prompts and prefix reuse change the same queues and page
// tables within one step; half of the methods are one-line queries.
//
// Single-threaded.
class Scheduler {
 public:
  Scheduler(const SchedulerLimits& limits, const PoolShape& pool);
  ~Scheduler();

  void enqueue(std::unique_ptr<Sequence> sequence);
  // Plans the next step and returns its rows, oldest sequence first. They are empty only if no sequence waits
  // or runs, or if is_waiting(). Valid until the next call.
  const std::vector<ScheduledRows>& plan_step();
  // plan_step() in pieces, for a caller with its own queue: begin_step() adds rows of decoding sequences and,
  // if it `admits`, admits sequences waiting here; can_admit() and admit() add sequences from the caller's
  // queue (admit takes ownership); finish_step() adds rows of prompts.
  void begin_step(bool admits = true);
  bool can_admit(const Sequence& sequence) const;
  void admit(std::unique_ptr<Sequence>& sequence);
  // Gives a sequence that is not enqueued yet pages for its prompt. Requires can_admit(). Borrows the
  // sequence until it is passed to admit_reserved(), or has no pages any more.
  void reserve(Sequence& sequence);
  // Takes ownership of a sequence that has reserved pages; it runs.
  void admit_reserved(std::unique_ptr<Sequence> sequence);
  // Makes room for another admission by giving back the last reservation, or by retracting the most recently
  // admitted sequence that yields. Returns false if there is neither, or this step admits nothing.
  bool yield_place() { return admits_ && (yield_reserved() || retract_yielding()); }
  void finish_step();
  // Whether the next step can be planned while a step with drafts is in flight (Executor::accepts_drafts()):
  // all its rows decode, and nothing is retracted even if all drafts are right. If so, reserve_ahead() gives
  // the sequences the pages for that; the step must then not admit any sequence.
  bool can_plan_ahead() const;
  void reserve_ahead();
  // Whether the next step would admit a sequence that waits here, or retract one that yields.
  bool is_about_to_admit() const;
  bool has_wanting() const {
    return std::ranges::any_of(running_, [](const auto& sequence) { return sequence->wants_rows(); });
  }
  bool has_yielding() const {
    return std::ranges::any_of(running_, [](const auto& sequence) { return sequence->yields(); });
  }
  // Returns the number of published pages that the sequence would start with.
  int64_t num_reusable_pages(const Sequence& sequence) const;
  const std::vector<ScheduledRows>& step() const { return step_; }
  // Marks the step's rows as cached. Call after the forward pass and before tokens are appended.
  void commit_step();
  // Marks the row after the cached ones as cached: a step computed it from a draft that is now the token at
  // this position.
  void keep_draft_row(Sequence& sequence);
  // Gives the sequence full pages for num_tokens tokens, as far as the pool has pages to spare. Returns the
  // number of tokens for which it has pages, at most num_tokens.
  int64_t grow_for_drafts(Sequence& sequence, int64_t num_tokens);
  // Removes the sequence's last row from the step, so that no token is chosen from it; a later step computes
  // the row again. Call before commit_step(), which retracts the sequence if it has a state, because the row
  // has changed that already.
  void drop_last_row(const Sequence& sequence);
  // Gives the pages of a running sequence back and queues it. Does nothing if it is not running.
  void retract(const Sequence& sequence);
  // Returns whether any sequence gets no rows until an event: its last token becomes known, its pages are
  // filled, its mask is ready or, if it is held, it is removed.
  bool is_waiting() const;
  // Holds a running sequence. Returns false and does nothing if the sequence is not running.
  bool hold(const Sequence& sequence);
  // Removes a sequence in any state, releases its pages and returns it; the pages of a failed sequence are
  // not kept for reuse. Returns null if there is no such sequence.
  std::unique_ptr<Sequence> remove(std::string_view id, bool failed = false);
  // Frees all cached pages and snapshots.
  void flush() { pages_.flush(); }
  // After a failed step, which may not have run its copies. Its sequences must be removed as failed.
  void drop_snapshots();
  // Returns the copies to run before the rows of the planned step.
  std::vector<StateCopy> take_state_copies() { return pages_.states().take_copies(); }
  // Returns null if there is no such sequence.
  Sequence* find(std::string_view id) const;
  // Returns the oldest running sequence, otherwise the first waiting one, otherwise the first held one,
  // otherwise null.
  Sequence* first() const;
  // Appends all sequences, running ones first.
  void list(std::vector<Sequence*>& sequences) const;

  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_held() const { return static_cast<int64_t>(held_.size()); }
  int64_t num_reserved() const { return static_cast<int64_t>(reserved_.size()); }
  int64_t num_placed() const { return num_running() + num_reserved(); }
  int64_t num_retracted() const { return num_retracted_; }
  double new_token_ratio() const { return new_token_ratio_.value(); }
  const PagePool& pages() const { return pages_; }
  // Returns the number of page references that belong to no sequence, plus the number of pages in no state,
  // for both groups of layers, plus the number of used state slots that belong to no sequence. Anything but 0
  // is a bug.
  int64_t num_leaked_pages() const;

 private:
  static bool may_start(const std::unique_ptr<Sequence>& waiting) { return !waiting->grammar.awaits_mask; }
  bool has_room(const Sequence& sequence) const;
  template <class Each>
  void for_others_placed(const Sequence& sequence, const Each& each) const;
  bool yield_reserved() { return num_running() < limits_.max_running_requests && give_back_reserved(); }
  bool give_back_reserved();
  int64_t expected_growth(const Sequence& sequence, int64_t num_pages) const;
  // Whether window pages can run out before full pages do.
  bool window_is_scarce() const {
    return pages_.num_window_pages() < pages_.num_pages() && pages_.has_window();
  }
  int64_t window_need(const Sequence& sequence) const;
  int64_t window_room(const Sequence& sequence) const;
  bool grow_or_retract(Sequence& sequence, int64_t num_tokens);
  void retract_last();
  bool retract_yielding();
  void retract(size_t index);
  std::vector<Sequence*> prompts() const;
  bool is_being_computed(size_t index) const;
  int64_t add_rows(Sequence& sequence, int64_t most, int64_t num_behind);
  int64_t add_drafts(Sequence& sequence);
  // Number of full pages that drafts may take, so that every running sequence can still get one.
  int64_t num_spare_pages() const { return std::max<int64_t>(0, pages_.num_available() - num_placed()); }
  void take_newer_prefix(Sequence& sequence);
  void commit_rows(Sequence& sequence, int64_t num_rows);
  std::span<const int32_t> reusable_tokens(const Sequence& sequence) const;
  PagePool::Prefix find_prefix(const Sequence& sequence) const;
  void take_prefix(Sequence& sequence);
  void take_pages(Sequence& sequence);
  void publish_prefix(Sequence& sequence);
  // States: where the rows of a prompt from `position` on must end, the position that drafts must not reach,
  // and the boundary at which a snapshot is due if one can be taken there.
  int64_t next_cut(const Sequence& sequence, int64_t position) const;
  int64_t end_of_drafts(const Sequence& sequence) const;
  int64_t next_due(const SequenceKv& kv) const;
  int64_t last_boundary(const Sequence& sequence) const;
  void start_state(Sequence& sequence, int64_t num_matched);
  bool is_at_boundary(const SequenceKv& kv) const;
  int32_t boundary_node(const SequenceKv& kv) const;
  void take_snapshot(Sequence& sequence);
  void leave_prefix(Sequence& sequence);
  void give_back_pages(Sequence& sequence);

  SchedulerLimits limits_;
  PagePool pages_;
  NewTokenRatio new_token_ratio_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  // in order of admission
  std::vector<std::unique_ptr<Sequence>> held_;
  std::vector<Sequence*> reserved_;  // in order of reservation; not owned
  std::vector<ScheduledRows> step_;
  int64_t logit_rows_left_ = 0;  // number of logit rows that the step can still have, out of
                                 // limits_.max_running_requests
  bool admits_ = false;          // nothing was retracted in this step
  int64_t num_retracted_ = 0;
};

}  // namespace fp4moe
