// Counts the output tokens that belong to reasoning.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "fp4moe/engine.h"
#include "server/chat/output_dialect.h"

namespace fp4moe {

// A token counts if a byte of its text is in a reasoning part of the parsed output. Markers, the white space
// that parsers drop, and tokens without text do not count. The count is 0 if the plan has no syntax for
// reasoning.
class ReasoningTokens {
 public:
  ReasoningTokens(const Engine& engine, const OutputPlan& plan);

  // Adds the next output tokens, as in Delta::token_ids. `end_token`: Delta::matched_stop_token, which ends
  // the output and is not part of its text.
  void push(std::span<const int32_t> ids, int32_t end_token);
  // Call after the last token; returns the count.
  int64_t finish();

 private:
  struct Token {
    size_t begin = 0, end = 0;  // of its bytes, in the bytes of all tokens
  };
  void count(const OutputParts& parts);

  const Engine& engine_;
  const std::unique_ptr<OutputParser> parser_;  // null: the output has no reasoning
  std::deque<Token> undecided_;                 // tokens whose text may still become reasoning
  size_t num_bytes_ = 0;
  int64_t count_ = 0;
};

// The count of a complete output.
int64_t count_reasoning_tokens(const Engine& engine, const OutputPlan& plan, std::span<const int32_t> ids,
                               int32_t end_token);

}  // namespace fp4moe
