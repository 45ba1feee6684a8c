// `fp4moe eval`'s score, for other subcommands.
#pragma once

#include <string>

#include "eval/eval_questions.h"

namespace fp4moe {

// The fraction of correct answers of the server at base_url: greedy, through the chat API (with shots, the
// completion API). kUnavailable: a request failed.
Result<double> score_server(const std::string& base_url, const QuestionOptions& questions);

}  // namespace fp4moe
