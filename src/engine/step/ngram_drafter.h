// Speculative decoding: guesses the next tokens of a sequence from a repetition in its tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/step/drafter.h"

namespace fp4moe {

struct NgramLimits {
  int64_t max_tokens = 0;                // most tokens in a draft; 0: no drafts
  int64_t min_match = 1, max_match = 1;  // tokens
};

// Returns the max_tokens tokens that follow the earlier occurrence of the sequence's end that matches the
// most tokens, of at most max_match; among equals, the latest one. If fewer tokens follow it, the draft
// repeats them, as the match says. Returns none if fewer than min_match tokens match.
std::vector<int32_t> ngram_draft(std::span<const int32_t> token_ids, const NgramLimits& limits);

class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const NgramLimits& limits) : limits_(limits) {}
  Status draft(DpScheduler& scheduler) override;

 private:
  const NgramLimits limits_;
  std::vector<Sequence*> listed_;
};

}  // namespace fp4moe
