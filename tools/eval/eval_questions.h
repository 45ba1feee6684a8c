// Question sets: loading, prompting and scoring.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct Question {
  std::string text;      // as in the data
  std::string prompt;    // as sent
  std::string expected;  // a number, or a letter A-D
};

struct QuestionSet {
  std::vector<Question> questions;
  std::vector<std::string> stop;  // stop strings of the few-shot form
  bool few_shot = false;          // plain-text form with worked examples
};

struct QuestionOptions {
  std::string eval_name;  // gsm8k | gpqa | mmlu
  std::string data_path;
  int64_t num_shots = 0;     // the first rows of the data are examples and are not asked
  int64_t num_examples = 0;  // 0: all
  uint64_t seed = 0;         // for the order of gpqa's choices
};

Result<QuestionSet> load_questions(const QuestionOptions& options);

// The final answer in a response: for gsm8k the number after "####", else the last number, without commas and
// trailing zeros; for the other sets the letter after the last "Answer:". Empty if not found.
std::string extract_answer(const std::string& eval_name, const std::string& answer);

// Rows of a CSV file (RFC 4180: quotes, doubled quotes, line breaks inside quotes).
Result<std::vector<std::vector<std::string>>> parse_csv(const std::string& text);

}  // namespace fp4moe
