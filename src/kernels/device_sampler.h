// Sampling on a GPU: rows of logits -> token ids and their log-probabilities.
#pragma once

#include <cstdint>

#include "kernels/batch.h"
#include "kernels/device_comm.h"

namespace fp4moe {

constexpr int kMaxTopLogprobs = 20;

// How one id's logit x changes before a token is chosen: `add` is added; the sum is divided by `scale`, or
// multiplied by it if the sum is negative; then `bias` is added. In f32, capped at the largest f32.
struct LogitEdit {
  int32_t token_id = 0;  // negative: as in SampleRowsArgs::chosen
  float add = 0;
  float scale = 1;  // above 0
  float bias = 0;
};

// How one row is sampled; fields mean the same as in SamplingParams.
struct SampleRowParams {
  double random = 0;      // uniform in [0, 1)
  float temperature = 1;  // 0: greedy
  float top_p = 1;
  int32_t top_k = -1;
  int32_t top_logprobs = -1;  // -1: no log-probabilities; n <= kMaxTopLogprobs
  float min_p = 0;
  int32_t given_id = -1;                  // >= 0: the token is given; only log-probabilities are computed
  int32_t first_edit = 0, num_edits = 0;  // range in SampleRowsArgs::edits; each id at most once per row, and
                                          // at most one negative id, which is edited last
  int32_t first_logprob_id = 0, num_logprob_ids = 0;  // range in SampleRowsArgs::logprob_ids; empty if
                                                      // top_logprobs < 0
  int32_t allowed = -1;       // index into SampleRowsArgs::allowed; -1: all ids are allowed
  uint64_t random_state = 0;  // from which move_randoms makes `random` (kernels/device_drafts.h)
};

enum class SampleStatus : int32_t {
  kOk,
  kBadLogits,  // the row contains NaN or +infinity, or only -infinity
  kNoToken,    // the logits of all allowed ids are -infinity
};

struct SampledRow {
  SampleStatus status = SampleStatus::kOk;  // otherwise token_id is 0 and the other fields are unspecified
  int32_t token_id = 0;
  float logprob = 0;    // only if top_logprobs >= 0
  int32_t num_top = 0;  // less than top_logprobs if there are fewer ids
  // Set by accept_drafts (kernels/device_drafts.h) only: of the drafts that follow the row.
  int32_t num_right = 0, num_drafts = 0;
  int32_t top_ids[kMaxTopLogprobs];
  float top_logprobs[kMaxTopLogprobs];  // best first
};

struct SampleRowsArgs {
  const float* logits = nullptr;  // [num_rows, row_stride]; the first vocab_size of each row are read
  int64_t num_rows = 0, vocab_size = 0, row_stride = 0;
  // [ceil(V / 32)] or null: ids (bit id % 32 of word id / 32) that are never sampled or listed; they still
  // count in the softmax's denominator.
  const uint32_t* masked = nullptr;
  const SampleRowParams* params = nullptr;  // [num_rows]; not read if all_greedy
  const LogitEdit* edits = nullptr;         // indexed by SampleRowParams::first_edit
  ChosenTokens chosen;                      // what negative ids in `edits` refer to
  // [masks, ceil(V / 32)], indexed by SampleRowParams::allowed: only ids whose bit (as in `masked`) is set
  // can be chosen. Masks do not change log-probabilities.
  const uint32_t* allowed = nullptr;
  const int32_t* logprob_ids = nullptr;  // indexed by SampleRowParams::first_logprob_id
  float* id_logprobs = nullptr;          // the log-probability of each of logprob_ids, masked ids too
  bool all_greedy = false;               // is_plain_greedy() holds for every row
  // [V] or null, only if all_greedy: the id that is put instead of each id. A row whose id has none (-1) is
  // kNoToken.
  const int32_t* put_ids = nullptr;
  SampledRow* out = nullptr;   // [num_rows]
  SampledRow* copy = nullptr;  // a second copy of `out`, for instance in pinned memory; or null
};

inline bool is_plain_greedy(const SampleRowParams& row) {
  return row.temperature == 0 && row.top_logprobs < 0 && row.given_id < 0 && row.num_edits == 0 &&
         row.allowed < 0;
}

// Samples all rows at once, as engine/output/sampler.h's Sampler does; logits are not modified. All pointers
// are device memory; work is enqueued on the current stream and can be captured. A choice differs from
// Sampler's only if `random`, top_p or min_p falls within 1e-6 of the edge between two ids. Precondition:
// vocab_size <= 400000.
using SampleRows = void (*)(const SampleRowsArgs&);
// Returns null in a build without CUDA.
SampleRows cuda_sample_rows();

// A rank's part of rows whose logits are distributed over the ranks of a group.
struct LogitShard {
  const CommGroup& group;
  CommOp op;
  int64_t first_id = 0;   // of SampleRowsArgs::logits, which are those of vocab_size consecutive ids
  int64_t num_rows = 0;   // of SampleRowsArgs::logits; the same on all ranks
  int64_t first_row = 0;  // this rank gets the results of SampleRowsArgs::num_rows rows from here on
};
// Samples rows that are all_greedy, with the results that SampleRows has for whole rows. A rank's vocab_size
// may be 0. `masked` and `put_ids` count from id 0. All ranks of the group enqueue it. If the group fails,
// every row is kBadLogits.
using SampleShards = void (*)(const SampleRowsArgs& rows, const LogitShard& shard);
// Returns null in a build without CUDA.
SampleShards cuda_sample_shards();

}  // namespace fp4moe
