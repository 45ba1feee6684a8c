// Loads question sets, builds prompts and extracts answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct Question {
  std::string text;      // as in the file
  std::string prompt;    // as sent to the server
  std::string expected;  // a number, or a letter A-D
};

struct QuestionSet {
  std::vector<Question> questions;
  std::vector<std::string> stop;  // stop strings for few-shot prompts
  bool few_shot = false;          // plain-text prompts with worked examples
};

struct QuestionOptions {
  std::string eval_name;  // gsm8k | gpqa | mmlu
  std::string data_path;
  int64_t num_shots = 0;     // the first rows of the file are the examples and are not asked
  int64_t num_examples = 0;  // 0: all
  uint64_t seed = 0;         // for shuffling gpqa's choices
};

Result<QuestionSet> load_questions(const QuestionOptions& options);

// Returns the final answer in a response. gsm8k: the number after "####", or else the last number, without
// commas and trailing zeros. gpqa and mmlu: the letter after the last "Answer:". Empty if there is none.
std::string extract_answer(const std::string& eval_name, const std::string& answer);

// Returns the rows of a CSV file (RFC 4180: quotes, doubled quotes, line breaks inside quotes).
Result<std::vector<std::vector<std::string>>> parse_csv(const std::string& text);

}  // namespace fp4moe
