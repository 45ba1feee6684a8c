// Executor: what the step loop runs its steps on. RankGroup is the real one.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "kernels/device_sampler.h"
#include "model/model.h"

namespace fp4moe {

class Executor {
 public:
  virtual ~Executor() = default;

  virtual const ModelConfig& config() const = 0;
  virtual int num_groups() const = 0;        // data-parallel groups, each with KV pages of its own
  virtual int64_t num_kv_pages() const = 0;  // of each group
  virtual int page_size() const = 0;

  // One step over num_groups() batches, some of them empty; not re-entrant. Afterwards logits() has group
  // after group, each group's logit_rows in order: [rows, V] f32, the caller's to change until the next step.
  virtual Status forward(std::span<const Batch> groups) = 0;
  virtual float* logits() = 0;
  // OK if forward() fills Batch::routed_experts, else why it does not.
  virtual Status tells_experts() const { return unsupported("this executor does not tell where tokens go"); }

  // An executor that samples by itself keeps the logits where they are, and takes a step before the tokens of
  // the one before are known: an id below 0 in a batch, ~r, is the token of row r of the last start_sample().
  virtual bool samples() const { return false; }
  virtual Status set_masked_ids(std::span<const int32_t>) { return {}; }
  // Asks for a token for each logit row of the last forward(), in that order, as Sampler would choose it; ids
  // of set_masked_ids() are never chosen. `edits` are what the rows' first_edit counts in, at most
  // max_logit_edits() of them; `allowed` what their `allowed` counts in, at most a mask a row.
  virtual Status start_sample(std::span<const SampleRowParams>, std::span<const LogitEdit> /*edits*/,
                              std::span<const uint32_t> /*allowed*/) {
    return internal_error("this executor does not sample");
  }
  // Waits for the tokens of the earliest start_sample() that were not taken; two of them may be waiting.
  virtual Status take_sampled(std::span<SampledRow>) {
    return internal_error("this executor does not sample");
  }
  // Not OK once no further step can run; a failed step may also be the matter of its batch alone.
  virtual Status failure() const = 0;

  // KV pages of a group in canonical form (KvCache::read_page), from any thread, while steps run that neither
  // write to the page that is read nor use the one that is written. An error is failure()'s.
  virtual int64_t kv_token_bytes() const { return 0; }  // 0: not to be had
  virtual Status read_page(int /*group*/, int32_t /*page*/, int64_t /*num_tokens*/, uint8_t* /*canonical*/) {
    return unsupported("this executor hands no KV pages over");
  }
  virtual Status write_page(int /*group*/, int32_t /*page*/, int64_t /*num_tokens*/,
                            const uint8_t* /*canonical*/) {
    return unsupported("this executor takes no KV pages in");
  }
  // Waits for the steps under way: none of them writes to a page any more. From the thread of forward().
  virtual Status finish_steps() { return {}; }

  virtual ThreadPool& pool() = 0;  // for sampling between steps
};

}  // namespace fp4moe
