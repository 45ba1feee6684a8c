// Speculative decoding: guesses the next tokens of a sequence from a repetition in its tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/schedule/sequence.h"

namespace fp4moe {

struct NgramLimits {
  int64_t max_tokens = 0;                // most tokens in a draft; 0: no drafts
  int64_t min_match = 1, max_match = 1;  // tokens
};

// Returns the max_tokens tokens that follow the earlier occurrence of the sequence's end that matches the
// most tokens, of at most max_match; among equals, the latest one. If fewer tokens follow it, the draft
// repeats them, as the match says. Returns none if fewer than min_match tokens match.
std::vector<int32_t> ngram_draft(std::span<const int32_t> token_ids, const NgramLimits& limits);

// Sets the drafts of the sequences for the next step. Only decoding sequences have any. A sequence with a
// grammar has none, because masks are filled token by token; neither has one that reports routed experts.
void draft_tokens(std::span<Sequence* const> sequences, const NgramLimits& limits);

}  // namespace fp4moe
