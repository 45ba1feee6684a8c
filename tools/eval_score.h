// What `fp4moe eval` comes to, for other verbs.
#pragma once

#include <string>

#include "eval_questions.h"

namespace fp4moe {

// The share of right answers of the server at base_url: greedy, through chat (with shots through completion).
// kUnavailable: a request failed.
Result<double> score_server(const std::string& base_url, const QuestionOptions& questions);

}  // namespace fp4moe
