// Sampler: one row of logits -> one token id, with its log-probabilities.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fp4moe/request.h"
#include "fp4moe/status.h"
#include "kernels/device_sampler.h"

namespace fp4moe {

// The random number of one token: uniform in [0, 1), a pure function of the request's seed and the
// token's position in its sequence, so that text does not depend on what else runs. It is element
// `position` of the SplitMix64 stream that starts at the mixed seed.
double token_random(uint64_t seed, int64_t position);
// A seed for the n-th request that names none.
uint64_t derived_seed(uint64_t random_seed, uint64_t n);

struct SampledToken {
  int32_t token_id = 0;
  float logprob = 0;              // with top_logprobs >= 0
  std::vector<TokenLogprob> top;  // best first; `bytes` are left empty
};

// Why a row has no token: kInternal.
Status bad_logits();  // NaN or infinity
Status no_token();    // every id is masked or at -infinity

// The edits change logits; then temperature scales them, then top_k keeps the k largest, then top_p keeps the
// shortest run of the largest whose probability (among those kept) reaches top_p, at least one token, then
// min_p keeps of these what has at least min_p times the probability of the best; equal logits rank by lower
// id. Temperature 0 takes the first of this order. Sums are in double, in a fixed order.
class Sampler {
 public:
  // masked_ids (ids without a token) are never sampled nor listed in `top`; they do count in the
  // normaliser of the log-probabilities, which are the model's own.
  Sampler(int64_t vocab_size, std::vector<int32_t> masked_ids);

  // logits [V] are overwritten (masked ids become -infinity). Of `allowed`, unless empty, bit id % 32 of word
  // id / 32 is set for the ids that may be sampled; `top` lists others too. Thread-safe. kInternal if the row
  // holds NaN or +infinity, or nothing to sample but -infinity.
  Result<SampledToken> sample(std::span<float> logits, const SamplingParams& params, double random,
                              std::span<const LogitEdit> edits = {},
                              std::span<const uint32_t> allowed = {}) const;
  // The log-probabilities of a token that is given, with top_logprobs >= 0; else as sample().
  Result<SampledToken> score(std::span<float> logits, int32_t token_id, int32_t top_logprobs) const;

 private:
  // Masks the row, whose largest logit was `maximum`, and takes its normaliser and its best ids.
  void read(std::span<float> logits, float maximum, int32_t top_logprobs, SampledToken& sampled,
            double& log_total) const;

  int64_t vocab_size_;
  std::vector<int32_t> masked_ids_;
};

}  // namespace fp4moe
