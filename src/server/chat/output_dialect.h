// The syntax a model uses for reasoning and tool calls, detected from its chat template and tokens, not its
// name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/chat/output_parser.h"
#include "server/json.h"

namespace fp4moe {

struct OutputDialect {
  CallSyntax calls = CallSyntax::kNone;
  bool thinks = false;                // <think>...</think> before the response
  bool fences_arguments = false;      // kDeepSeek: "function", name and ```json (V3, R1); else only the name
  bool needs_special_tokens = false;  // markers are visible only with skip_special_tokens off
  bool shows_tools = false;           // the template renders tools
  bool has_developer_role = false;    // else developer messages become system messages
  bool names_thinking = false;        // the template reads reasoning from a message's "thinking" field
};
OutputDialect detect_dialect(const Engine& engine);
bool is_special(const Engine& engine, int32_t id);

// The tools of one request, with tool_choice applied.
struct ToolUse {
  struct Function {
    std::string name;
    json parameters;    // a JSON Schema
    std::string place;  // of the parameters in the request, such as "tools[0].function.parameters"
  };
  std::vector<Function> functions;  // the callable functions
  bool is_forced = false;           // the response must be a call
  bool parallel = true;             // several calls are allowed
  bool is_legacy = false;           // given as OpenAI's legacy "functions"
};

// How to parse the response to the rendered `prompt`.
struct OutputPlan {
  CallSyntax calls = CallSyntax::kNone;  // the syntax of the response's calls
  bool separates_reasoning = true;
  bool starts_inside_reasoning = false;
  bool thinks = false;
  bool is_forced = false;  // the response is a call: text that is not one is dropped
  std::shared_ptr<const ArgumentTypes> argument_types;  // of the functions; null: not needed
};
OutputPlan plan_output(const OutputDialect& dialect, const std::string& prompt, const ToolUse& tools,
                       bool separate_reasoning);
std::unique_ptr<OutputParser> make_parser(const OutputPlan& plan);

// A grammar for the dialect's optional prefix (reasoning, channels) followed by `content` or, if the request
// has tools and the dialect a syntax for calls, by calls of tools.functions with any arguments. kNone and
// kStructuralTag are returned unchanged.
GrammarSpec constrain_content(const Engine& engine, const OutputDialect& dialect, const std::string& prompt,
                              const ToolUse& tools, const GrammarSpec& content);
// The same prefix followed by at least one call of tools.functions, in the model's own syntax, or as a JSON
// array if the template defines none.
GrammarSpec constrain_calls(const Engine& engine, const OutputDialect& dialect, const std::string& prompt,
                            const ToolUse& tools);

}  // namespace fp4moe
