// A sequence for scheduler tests: arbitrary prompt tokens, and room for output.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/fake_tokenizer.h"
#include "engine/schedule/sequence.h"

namespace fp4moe {

inline std::unique_ptr<Sequence> sequence(const std::string& id, int64_t num_prompt_tokens,
                                          int64_t num_output_tokens) {
  static const Tokenizer tokenizer = fake_tokenizer();
  return std::make_unique<Sequence>(
      Sequence{.id = id,
               .num_prompt_tokens = num_prompt_tokens,
               .max_tokens = num_prompt_tokens + num_output_tokens,
               .token_ids = std::vector<int32_t>(static_cast<size_t>(num_prompt_tokens), 1),
               .output = {.text = OutputText(tokenizer, true, {})}});
}

}  // namespace fp4moe
