// Sampling on a GPU: rows of logits -> token ids and their log-probabilities, which the host copies once.
#pragma once

#include <cstdint>

namespace fp4moe {

constexpr int kMaxTopLogprobs = 20;

// What happens to one id's logit x before a token is chosen: x + add, then divided by `scale` (if it is below
// 0, multiplied), then + bias; f32 operations, at most the largest f32.
struct LogitEdit {
  int32_t token_id = 0;
  float add = 0;
  float scale = 1;  // above 0
  float bias = 0;
};

// How one row is sampled; fields as in SamplingParams, with the same meaning.
struct SampleRowParams {
  double random = 0;      // uniform in [0, 1)
  float temperature = 1;  // 0: greedy
  float top_p = 1;
  int32_t top_k = -1;
  int32_t top_logprobs = -1;  // -1: no log-probabilities; n <= kMaxTopLogprobs
  float min_p = 0;
  int32_t given_id = -1;                  // >= 0: this is the token, only its log-probabilities are wanted
  int32_t first_edit = 0, num_edits = 0;  // of the list of edits; an id at most once in a row
  int32_t allowed = -1;                   // of the list of masks; -1: all ids may be chosen
};

enum class SampleStatus : int32_t {
  kOk,
  kBadLogits,  // the row holds NaN or +infinity, or nothing but -infinity
  kNoToken,    // all ids that may be chosen are at -infinity
};

struct SampledRow {
  SampleStatus status = SampleStatus::kOk;  // otherwise token_id is 0 and the rest unspecified
  int32_t token_id = 0;
  float logprob = 0;    // with top_logprobs >= 0
  int32_t num_top = 0;  // fewer than asked for if there are not so many ids
  int32_t top_ids[kMaxTopLogprobs];
  float top_logprobs[kMaxTopLogprobs];  // best first
};

struct SampleRowsArgs {
  const float* logits = nullptr;  // [num_rows, row_stride], of which vocab_size are read
  int64_t num_rows = 0, vocab_size = 0, row_stride = 0;
  // [ceil(V / 32)] or null: ids (bit id % 32 of word id / 32) that are never sampled nor listed; they count
  // in the normaliser.
  const uint32_t* masked = nullptr;
  const SampleRowParams* params = nullptr;  // [num_rows]; all_greedy: not read
  const LogitEdit* edits = nullptr;         // what first_edit counts in
  // [masks, ceil(V / 32)], what `allowed` counts in: only ids whose bit (as in `masked`) is set are chosen.
  // Masks change nothing about log-probabilities.
  const uint32_t* allowed = nullptr;
  bool all_greedy = false;     // every row is_plain_greedy()
  SampledRow* out = nullptr;   // [num_rows]
  SampledRow* copy = nullptr;  // the same again, for instance in pinned memory; or null
};

inline bool is_plain_greedy(const SampleRowParams& row) {
  return row.temperature == 0 && row.top_logprobs < 0 && row.given_id < 0 && row.num_edits == 0 &&
         row.allowed < 0;
}

// What engine/sampler.h's Sampler does, for all rows at once; logits stay as they are. All pointers are
// device memory; work goes to the current stream and can be captured. A choice differs from Sampler's only
// where `random`, top_p or min_p falls within 1e-6 of the edge between two ids. Precondition: vocab_size <=
// 400000.
using SampleRows = void (*)(const SampleRowsArgs&);
// Null in a build without CUDA.
SampleRows cuda_sample_rows();

}  // namespace fp4moe
