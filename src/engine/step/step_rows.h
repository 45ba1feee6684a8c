// StepRows: holds the rows of logits of the step in flight (current) and of the step enqueued after it
// (next), and runs their forward pass and sampling.
//
//              an executor that samples (GPU)       sampling on the host, or drafts
//              next              current            next              current
//   forward    step n + 1        step n             step n            empty
//   sample     enqueued          enqueued           tokens chosen
//   take       enqueued          tokens known       empty             step n
//   (the loop delivers the tokens of current)
//   advance    empty             step n + 1         empty             empty
//
// If the executor accepts drafts, a step with drafts may stay in flight like the steps on the left; it does
// if the step before it is in flight, or if the caller can plan the next step without its tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/output/sampler.h"
#include "engine/ranks/executor.h"
#include "engine/schedule/dp_scheduler.h"
#include "engine/step/group_rows.h"

namespace fp4moe {

// A row of logits. It chooses the next token of its sequence, or scores a prompt token.
struct LogitRow {
  Sequence* sequence = nullptr;  // null: the sequence has ended, or its mask was late
  SampledToken token;
  Status status;
  bool is_scored = false;             // token.token_id is a prompt token to score
  std::span<const uint32_t> allowed;  // mask from the sequence's grammar; empty: all ids
  int64_t depth = 0;       // the row follows the first `depth` draft tokens of its sequence; 0: none
  int64_t num_drafts = 0;  // rows with drafts after a row of depth 0
};

// Used by the loop's thread only. The executor is borrowed.
class StepRows {
 public:
  struct Drafts {
    // Rows may follow drafts, so that the next step depends on the tokens of this one; then sample() waits
    // for an executor that samples.
    bool can_exist = false;
    double synthetic_acceptance = -1;  // EngineConfig::speculative_synthetic_acceptance
    bool are_accepted = false;         // steps may stay in flight; requires Executor::accepts_drafts()
  };
  // masked_ids: as in Sampler.
  StepRows(Executor& executor, std::vector<int32_t> masked_ids, const Drafts& drafts);

  // Runs the model on the planned step's rows; next() then holds those with logits.
  Status forward(DpScheduler& scheduler);
  // Enqueues the sampling of next() if the executor samples.
  Status start_sample();
  // Then: chooses the tokens of next(), or waits for the executor's unless the loop runs ahead or the step
  // stays in flight. Appends an unknown token ~r to the sequence of each row r that chooses a token; while a
  // step with drafts is in flight, only r before the drafts.
  Status sample(bool can_stay = false);
  // Whether the rows of next() can stay in flight: their sequences need no token to go on.
  bool can_stay() const;
  // Whether the tokens of current() have not been taken, and drafts may be among them.
  bool has_drafts_in_flight() const { return stays_current_; }
  // Makes current() the rows whose tokens are to be delivered. Waits for the executor if the loop runs ahead
  // or they are in flight.
  Status take_sampled();
  void advance();

  std::span<LogitRow> current() { return current_; }
  std::span<LogitRow> next() { return next_; }
  void discard_current() { current_.clear(), stays_current_ = false; }
  void discard_next() { next_.clear(), stays_next_ = false; }
  // Drops the rows of a sequence that has ended.
  void forget(const Sequence& sequence);

 private:
  void gather(GroupRows& rows, std::span<const ScheduledRows> step);
  void sample_on_host();
  void append_edits(const LogitRow& row, std::vector<LogitEdit>& edits) const;
  void append_own_edits(const LogitRow& row, std::vector<LogitEdit>& edits) const;
  Status take_drafts();
  void drop_wrong_drafts();
  void leave_in_flight();
  void keep_right_drafts();
  void record_experts();
  Status start_on_executor();
  Status take_from_executor(std::span<LogitRow> rows);
  SampleRowParams params_of(LogitRow& row);

  Executor& executor_;
  const bool runs_ahead_;      // a step is enqueued before the tokens of the step before it are known
  const bool accepts_drafts_;  // on the executor
  const double synthetic_acceptance_;
  Sampler sampler_;
  std::vector<GroupRows> groups_;  // [dp]
  std::vector<LogitRow> current_, next_;
  bool stays_current_ = false, stays_next_ = false;  // in flight, with drafts that the executor accepts
  int64_t num_rows_ = 0;                             // of the last forward pass
  // Arguments of the executor's sampling.
  std::vector<SampleRowParams> params_;
  std::vector<LogitEdit> edits_;
  std::vector<uint32_t> allowed_;
  std::vector<int32_t> logprob_ids_;
  // Its results.
  std::vector<SampledRow> sampled_;
  std::vector<float> id_logprobs_;
};

}  // namespace fp4moe
