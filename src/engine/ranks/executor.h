// Executor: runs the step loop's steps. RankGroup is the production implementation.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "engine/ranks/draft_shape.h"
#include "engine/ranks/page_copy.h"
#include "kernels/device_sampler.h"
#include "model/model.h"

namespace fp4moe {

// Large because an executor may sample, run a draft model and exchange pages, each with a few methods.
class Executor {
 public:
  virtual ~Executor() = default;

  virtual const ModelConfig& config() const = 0;
  virtual int num_groups() const = 0;        // data-parallel groups, each with its own KV pages
  virtual int64_t num_kv_pages() const = 0;  // per group
  virtual int64_t num_window_pages() const {
    return 0;
  }  // of window layers; 0: all layers use num_kv_pages()
  virtual int page_size() const = 0;
  virtual int64_t num_slots() const { return 0; }  // of states, per group, with slot 0; 0: no states
  // Returns the window of the layers with window pages.
  KvWindow window() const { return {num_window_pages() > 0 ? KvCache::window(config()) : 0, page_size()}; }

  // Runs one step over num_groups() batches, some of which may be empty; not re-entrant. logits() then holds
  // the logits of one group after another, each group's in the order of its logit_rows: [rows, V] f32. The
  // caller may modify them until the next step.
  //
  // If Batch::model is kDraft, which all batches of a step then have, the draft model runs instead: with
  // draft_shape().vocab_size columns of logits, and with separate pages of draft keys and values under the
  // same numbers as the full page tables' pages.
  virtual Status execute_step(std::span<const Batch> groups) = 0;
  virtual float* logits() = 0;
  virtual DraftShape draft_shape() const { return {}; }
  virtual std::span<const int32_t> draft_token_ids() const { return {}; }  // Model::token_ids() of the draft
  // Waits for the passes of the draft model, and takes an id for each row of logits: that of the target for
  // the most probable token (in a tie, the lowest id of the draft model), or -1 if the target has none, or if
  // a logit is NaN or infinite (on a GPU: NaN or +infinity, or only -infinity). `first` is 0 and the rows are
  // those of the last execute_step(), unless the executor keeps draft ids. Logits need not be on the host.
  virtual Status take_draft_ids(int32_t first, std::span<int32_t> ids);
  // An executor that keeps draft ids chooses them on the device, -1 for ids passed to set_masked_ids(), and
  // accepts further steps before they are known. The rows of logits of the draft model's passes are numbered
  // from what begin_drafts() returns, which is at least kFirstDraft; there may be 2 * max_logit_rows. An id
  // ~n in a batch or an edit means the id of row n, or 0 if that is -1, and take_draft_ids() takes those of
  // rows from `first` on. It waits only for passes since the begin_drafts() before row `first`; ids are kept
  // until the next but one begin_drafts().
  static constexpr int32_t kFirstDraft = 1 << 24;
  virtual bool keeps_draft_ids() const { return false; }
  virtual int32_t begin_drafts() { return 0; }
  // The logits of so few rows of the draft model take about as long as those of one.
  virtual int64_t num_cheap_draft_rows() const { return 0; }
  // Returns OK if execute_step() fills Batch::routed_experts, otherwise the reason why it does not.
  virtual Status supports_routed_experts() const {
    return unsupported("this executor does not report routed experts");
  }

  // An executor that samples keeps the logits on the device and accepts a step before the tokens of the
  // previous step are known: an id ~r (negative) in a batch means the token of row r of the last
  // start_sample().
  virtual bool samples() const { return false; }
  virtual Status set_masked_ids(std::span<const int32_t>) { return {}; }
  // Starts sampling a token for each logit row of the last execute_step(), in that order. Chooses the tokens
  // that Sampler would choose, and never an id passed to set_masked_ids(). Each row's first_edit indexes
  // `edits` (at most max_logit_edits() in all), its `allowed` indexes the masks in `allowed` (at most one per
  // row), and its first_logprob_id indexes `logprob_ids` (at most kMaxLogprobIds per row, in row order).
  virtual Status start_sample(std::span<const SampleRowParams>, std::span<const LogitEdit> /*edits*/,
                              std::span<const uint32_t> /*allowed*/,
                              std::span<const int32_t> /*logprob_ids*/) {
    return internal_error("this executor does not sample");
  }
  // Waits for the tokens of the earliest start_sample() whose tokens have not been taken; at most two such
  // calls may be pending. `id_logprobs` takes the log-probabilities of its logprob_ids.
  virtual Status take_sampled(std::span<SampledRow>, std::span<float> /*id_logprobs*/) {
    return internal_error("this executor does not sample");
  }
  // An executor that accepts drafts keeps draft ids, and after start_sample() of a step in which every
  // sequence has one token and drafts, all with logits, accept_drafts() counts the right drafts on the
  // device. take_sampled() then sets SampledRow::num_right and num_drafts of each sequence's first row, and
  // the rows of later batches can move by these numbers (Batch::moves) before they are known.
  virtual bool accepts_drafts() const { return false; }
  virtual Status accept_drafts() { return internal_error("this executor accepts no drafts"); }
  // Returns an error once no further step can run. A step can also fail because of its batch alone.
  virtual Status failure() const = 0;

  // Reads or writes one KV page of a group in canonical form (KvCache::read_page): a page of full layers is
  // followed by that of a draft model that takes features, which no other node can compute from tokens.
  // Callable from any thread
  // while steps run, provided that these steps neither write to the page being read nor use the page being
  // written. Errors are those of failure().
  virtual int64_t kv_token_bytes() const { return 0; }  // bytes per token; 0 if unsupported
  virtual int64_t window_token_bytes() const { return 0; }
  virtual Status read_page(int /*group*/, PageId /*page*/, int64_t /*num_tokens*/, uint8_t* /*canonical*/) {
    return unsupported("this executor cannot export KV pages");
  }
  virtual Status write_page(int /*group*/, PageId /*page*/, int64_t /*num_tokens*/,
                            const uint8_t* /*canonical*/) {
    return unsupported("this executor cannot import KV pages");
  }
  // The same for several pages, whose canonical forms are in separate memory. After an error the bytes read
  // are undefined.
  virtual Status read_pages(int group, std::span<const PageRead> pages) {
    for (const PageRead& p : pages)
      FP4MOE_RETURN_IF_ERROR(read_page(group, p.page, p.num_tokens, p.canonical.data()));
    return {};
  }
  virtual Status write_pages(int group, std::span<const PageWrite> pages) {
    for (const PageWrite& p : pages)
      FP4MOE_RETURN_IF_ERROR(write_page(group, p.page, p.num_tokens, p.canonical.data()));
    return {};
  }
  // The bytes that such a call copies best; 0: one page is as good as several.
  virtual int64_t page_batch_bytes() const { return 0; }
  // Reads or writes bytes from `first` on of a state slot of a group in canonical form
  // (StateCache::read_slot), which has state_bytes() in all; 0: the model has no states. The rules are those
  // of pages.
  int64_t state_bytes() const { return StateCache::bytes_per_slot(config()); }
  // Whether a prompt's pages are complete once a step has computed their rows. A state changes until the last
  // row, and a draft model that takes features writes its part of the pages after the steps.
  bool steps_complete_pages() const { return state_bytes() == 0 && !draft_shape().takes_features; }
  virtual Status read_state(int /*group*/, int32_t /*slot*/, int64_t /*first*/,
                            std::span<uint8_t> /*canonical*/) {
    return unsupported("this executor cannot export states");
  }
  virtual Status write_state(int /*group*/, int32_t /*slot*/, int64_t /*first*/,
                             std::span<const uint8_t> /*canonical*/) {
    return unsupported("this executor cannot import states");
  }
  // Runs copies of a group's slots before the next step does. Called on the thread that calls execute_step().
  virtual Status copy_states(int /*group*/, std::span<const StateCopy> /*copies*/) {
    return unsupported("this executor cannot copy states between steps");
  }
  // Waits for the steps in flight, so that none of them writes to a page or a slot any more. Called on the
  // thread that calls execute_step().
  virtual Status finish_steps() { return {}; }
  // The same for all steps but the last one.
  virtual Status finish_steps_before_last() { return {}; }

  // Between steps: moves experts between the ranks by the loads since the last call. kUnsupported: experts
  // are not placed by load. Any other error is that of failure().
  virtual Result<ExpertMoves> rebalance_experts() {
    return unsupported("experts are not placed by load; --enable-eplb does so");
  }

  virtual ThreadPool& pool() = 0;  // for sampling between steps
};

}  // namespace fp4moe
