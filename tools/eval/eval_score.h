// The score of `fp4moe eval`, for other subcommands.
#pragma once

#include <string>

#include "eval/eval_questions.h"

namespace fp4moe {

// Returns the fraction of questions that the server at base_url answers correctly with greedy decoding
// through the chat API (the completion API if there are shots). If requests fail, returns the error of the
// first of them.
Result<double> score_server(const std::string& base_url, const QuestionOptions& questions);

}  // namespace fp4moe
