// ModelDrafter: drafts with the executor's draft model, by repeatedly taking its most probable next token.
//
// A sequence has n tokens, and D more are drafted. The draft model takes tokens alone, or features too:
//
//                      tokens alone         features too
//   row p takes        token p              token p + 1, and the target's features of row p
//   extend: rows to    n - 1                n - 2
//   chain: then        D - 1 rows, each     the same, and the draft model's features
//                      with the last draft  of the row before
//
// If the executor keeps draft ids, the host does not wait for them: chained passes and the next step read
// them on the device, and the host takes them with the step's tokens (StepRows::sample()). It waits at the
// end of draft() if the ids decide a penalty or a mask.
//
// A draft model that takes features then extends a small step that only decodes before the host knows the
// step's tokens, so that the device computes while the host takes and delivers them (run_ahead()). All rows
// are extended with the tokens that they sample, and each chooses a draft; draft() continues after the last
// correct one, and the next extension overwrites the rows after it.
//
// If the executor accepts drafts, draft_ahead() goes on without the tokens: the chain starts at the row of
// the last right draft, which the device knows, and so do the rows of the next extension (Batch::moves).
//
// Extension computes the rows of the last step whose tokens are now known, of prompts too, so that the pages
// of a prefix hold its draft keys and values when another sequence takes them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/ranks/executor.h"
#include "engine/step/drafter.h"
#include "engine/step/group_rows.h"

namespace fp4moe {

// Large because extending, chaining and running ahead share the passes.
class ModelDrafter final : public Drafter {
 public:
  // The executor has a draft model and is borrowed. `max_drafts`: per sequence and step. `shares_pages`:
  // whether other sequences may take the pages of a sequence that has ended. `masked_ids`: the target's ids
  // without a token, which are never right and end a draft.
  ModelDrafter(Executor& executor, int64_t max_drafts, bool shares_pages,
               std::span<const int32_t> masked_ids);

  Status draft(DpScheduler& scheduler) override;
  void keep_step(const DpScheduler& scheduler) override;
  Status run_ahead(int64_t num_sampled) override;
  bool has_run_ahead() const override { return is_ahead_; }
  Status draft_ahead(DpScheduler& scheduler) override;
  void settle_step() override;
  void end(const Sequence& sequence) override;
  bool runs_model() const override { return true; }
  void wait_in_next_draft() override { waits_ = true; }
  bool has_waited() const override { return has_waited_; }

 private:
  // A sequence's rows in the last step.
  struct Kept {
    Sequence* sequence = nullptr;  // null: it has ended
    int64_t first_row = 0, num_rows = 0, first_position = 0;
    bool decodes = false;
    bool moves = false;         // first_position is that without right drafts in the step before
    int64_t num_in_flight = 0;  // most right drafts in that step
    int32_t first_id = 0;       // of the draft that follows the first of its rows, if they run ahead
    // The pages of the rows wherever they move to, from page first_page of the table on, before they were
    // published.
    std::vector<int32_t> pages;
    int64_t first_page = 0;
    // Only if it has ended, as they were then.
    std::vector<int32_t> token_ids, page_table;
    int64_t num_cached = 0, num_draft_cached = 0;
  };
  // The draft model's rows of a sequence.
  struct Work {
    Sequence* sequence = nullptr;        // null: it has ended
    std::span<const int32_t> input_ids;  // by position
    std::span<const int32_t> page_table;
    int64_t next = 0, end = 0;   // positions to extend
    int64_t feature_offset = 0;  // the target's row of position p is p + feature_offset
    int64_t max_drafts = 0;      // 0: the sequence gets none
    int64_t row = 0;             // its last row in the last pass
    int32_t moved_by = -1;       // RowsMove::row of its chained rows
    std::vector<int32_t> drafts;
  };
  // One group's rows in a pass.
  struct Pass {
    GroupRows rows;
    std::vector<int64_t> feature_rows;
    std::vector<Work*> choosing;  // for each row of logits
  };

  Work work_of(const Kept& kept) const;
  int64_t end_of_exchanged_pages(const Kept& kept, std::span<const int32_t> page_table) const;
  Work work_of(Sequence& sequence, const Kept& kept, DpScheduler& scheduler);
  static void continue_ahead(Work& work, const Kept& kept);
  Work work_ahead(Sequence& sequence, const Kept& kept, DpScheduler& scheduler);
  Status chain_and_keep(std::vector<std::vector<Work>>& work);
  int64_t plan_drafts(Sequence& sequence, int64_t last, DpScheduler& scheduler);
  int64_t first_foreign_id(std::span<const int32_t> input_ids, int64_t end) const;
  void claim_pages(int group, Work& work);
  int64_t end_before_granted_page(int group, const Work& work) const;
  Status extend(std::vector<std::vector<Work>>& work);
  Status chain(std::vector<std::vector<Work>>& work);
  static void add_rows(Pass& pass, Work& work, std::span<const int32_t> ids, int64_t first_position);
  // Makes the pass choose a draft after the work's last row.
  static void choose_after(Pass& pass, Work& work);
  template <class Add>
  Status run_passes(std::vector<std::vector<Work>>& work, bool chains, const Add& add);
  void clear_passes();
  Status run_pass(bool chains);
  Status execute_pass(bool chains);
  bool may_run_ahead(int64_t num_sampled) const;
  bool runs_ahead(const Kept& kept) const { return kept.first_id != 0; }
  void begin_drafts();
  Status choose_ids(std::span<Work* const> choosing);
  Status take_ids(const std::vector<std::vector<Work>>& work);
  bool host_needs_ids(const std::vector<std::vector<Work>>& work) const;
  int64_t page_of(int64_t position) const { return position / page_size_; }

  Executor& executor_;
  const DraftShape shape_;
  const int64_t max_drafts_;
  const bool shares_pages_;
  const int page_size_;
  std::vector<bool> is_masked_;          // [V of the target]
  std::vector<std::vector<Kept>> last_;  // [dp]
  std::vector<Pass> passes_;             // [dp]
  // [dp][pages]: the last call of draft() that extended rows in the page, and that gave it to a sequence.
  std::vector<std::vector<int64_t>> written_, granted_;
  int64_t call_ = 0;
  int32_t first_id_ = 0, num_kept_ = 0;  // ids on the device for this call of draft()
  bool is_ahead_ = false;                // the first of them are those of run_ahead()
  bool waits_ = false, has_waited_ = false;
};

}  // namespace fp4moe
