// Sampler: one row of logits -> one token id, with its log-probabilities.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fp4moe/request.h"
#include "fp4moe/status.h"
#include "kernels/device_sampler.h"

namespace fp4moe {

// The random number for one token (kernels/token_random.h). It depends on the request's seed and the token's
// position in its sequence only, so that a request's text does not depend on other requests.
double token_random(uint64_t seed, int64_t position);
// The seed of the n-th request if that request has none.
uint64_t derived_seed(uint64_t random_seed, uint64_t n);

struct SampledToken {
  int32_t token_id = 0;
  float logprob = 0;              // only with top_logprobs >= 0
  std::vector<TokenLogprob> top;  // best first; `bytes` is left empty, here and in `ids`
  std::vector<TokenLogprob> ids;  // of SamplingParams::token_ids_logprob, masked ids too
};

// Return kInternal for a row from which no token can be chosen.
Status bad_logits();  // a logit is NaN or infinity
Status no_token();    // every id is masked or at -infinity

// The order of operations: edits change the logits, temperature scales them, top_k keeps the k largest, top_p
// keeps the most likely tokens until their renormalised probabilities reach top_p (at least one token), and
// min_p drops tokens with less than min_p times the highest probability. Equal logits rank by lower id.
// Temperature 0 takes the first token of this order. Sums are in double, in a fixed order.
class Sampler {
 public:
  // masked_ids (ids without a token) are never sampled or listed in `top`, but they count in the normaliser
  // of the log-probabilities, which are those of the unmodified model.
  Sampler(int64_t vocab_size, std::vector<int32_t> masked_ids);

  // Samples one token. logits [V] are overwritten (masked ids become -infinity). If `allowed` is not empty,
  // bit id % 32 of word id / 32 marks the ids that may be sampled; `top` ignores it. Thread-safe. kInternal
  // if the row contains NaN or +infinity, or if no id that may be sampled has a finite logit.
  Result<SampledToken> sample(std::span<float> logits, const SamplingParams& params, double random,
                              std::span<const LogitEdit> edits = {},
                              std::span<const uint32_t> allowed = {}) const;
  // Returns the log-probabilities of a given token; params.top_logprobs must be at least 0. Overwrites logits
  // and fails as sample() does.
  Result<SampledToken> score(std::span<float> logits, int32_t token_id, const SamplingParams& params) const;

 private:
  // Computes the normaliser of a row whose largest logit is `maximum`, and the log-probabilities that params
  // lists; masks the row.
  void read(std::span<float> logits, float maximum, const SamplingParams& params, SampledToken& sampled,
            double& log_total) const;

  int64_t vocab_size_;
  std::vector<int32_t> masked_ids_;
};

}  // namespace fp4moe
