// How a model writes reasoning and tool calls: read off its chat template and tokens, never off its name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/answer_parser.h"
#include "server/json.h"

namespace fp4moe {

struct AnswerDialect {
  CallSyntax calls = CallSyntax::kNone;
  bool thinks = false;                // <think>...</think> before the answer
  bool fences_arguments = false;      // kDeepSeek: function, name and ```json (V3, R1), not name alone
  bool needs_special_tokens = false;  // its markers show only with skip_special_tokens off
  bool shows_tools = false;           // the template has a place for them
  bool has_developer_role = false;    // else such messages become system messages
  bool names_thinking = false;        // the template reads a message's reasoning as "thinking"
};
AnswerDialect detect_dialect(const Engine& engine);
bool is_special(const Engine& engine, int32_t id);

// What a request's tools come to.
struct ToolUse {
  struct Function {
    std::string name;
    json parameters;  // a JSON Schema
  };
  std::vector<Function> functions;  // that may be called
  bool is_forced = false;           // one of them must be
  bool parallel = true;             // more than one may be
};

// For the answer to `prompt`, as rendered.
struct AnswerPlan {
  CallSyntax calls = CallSyntax::kNone;  // that the answer is written in
  bool separates_reasoning = true;
  bool starts_inside_reasoning = false;
  bool thinks = false;
};
AnswerPlan plan_answer(const AnswerDialect& dialect, const std::string& prompt, const ToolUse& tools,
                       bool separate_reasoning);
std::unique_ptr<AnswerParser> make_parser(const AnswerPlan& plan);

// The grammar that allows what comes before the answer proper (reasoning, channels), then `content`.
GrammarSpec constrain_content(const Engine& engine, const AnswerDialect& dialect, const std::string& prompt,
                              const GrammarSpec& content);
// The same before at least one call of tools.functions, in the model's own syntax or, where the template
// knows none, as a JSON array.
GrammarSpec constrain_calls(const Engine& engine, const AnswerDialect& dialect, const std::string& prompt,
                            const ToolUse& tools);

}  // namespace fp4moe
