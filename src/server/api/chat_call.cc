#include "server/api/chat_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/api/apis.h"
#include "server/api/chat_tools.h"
#include "server/chat/grammar_fields.h"

namespace fp4moe {

namespace {

// Fields of other servers' chats that are not supported, with the value that has no effect.
void refuse_chat_fields(Fields& fields) {
  fields.refuse("add_special_tokens", false);
  fields.refuse("echo", false);
  fields.refuse("input_ids", json::array());
  fields.refuse("documents", nullptr);
  fields.refuse("chat_template", nullptr);
  fields.refuse("parse_tool_calls", true);
  fields.refuse("thinking_forced_open", false);
}

// SGLang's "separate_reasoning", or llama-server's "reasoning_format".
bool read_separate_reasoning(Fields& fields) {
  const std::string format = fields.string("reasoning_format", "auto");
  const char* known[] = {"auto", "none", "deepseek", "deepseek-legacy"};
  if (std::find(std::begin(known), std::end(known), format) == std::end(known))
    fields.fail("reasoning_format",
                "must be \"auto\", \"none\", \"deepseek\" or \"deepseek-legacy\", got " + shown(format));
  return fields.boolean("separate_reasoning", format != "none");
}

}  // namespace

ChatInput read_chat_input(const Engine& engine, Fields& fields) {
  ChatInput input{.dialect = detect_dialect(engine)};
  input.messages = read_messages(engine, fields, input.dialect);
  input.options = read_template_options(fields);
  input.tools = read_tools(engine, input.dialect, fields, input.options);
  input.separate_reasoning = read_separate_reasoning(fields);
  refuse_chat_fields(fields);

  SamplingParams& sampling = input.sampling = read_sampling(fields, engine.info().default_sampling);
  sampling.grammar = read_grammar(engine, fields);
  const bool has_grammar = sampling.grammar.kind != GrammarSpec::Kind::kNone;
  read_response_format(engine, fields, sampling.grammar);
  // A response format of JSON constrains only text, and a forced call leaves none: instructor sends both.
  if (input.tools.is_forced && (has_grammar || sampling.grammar.kind == GrammarSpec::Kind::kStructuralTag))
    fields.fail("tool_choice", "requires a tool call, but another field constrains the output text");
  const int64_t max_tokens = read_max_tokens(fields, engine.info().context_length);
  sampling.max_new_tokens = fields.integer("max_completion_tokens", max_tokens, 0, INT32_MAX);
  const bool logprobs = fields.boolean("logprobs", false);
  const int64_t top = fields.integer("top_logprobs", 0, 0, kMaxTopLogprobs);
  if (top > 0 && !logprobs) fields.fail("top_logprobs", "requires \"logprobs\": true");
  if (logprobs) sampling.top_logprobs = static_cast<int32_t>(top);
  return input;
}

ChatPrompt render_chat(const Engine& engine, Fields& fields, const ChatInput& input) {
  Result<std::string> prompt = engine.apply_chat_template(input.messages.text, input.options);
  if (!prompt.ok()) {
    fail_text(fields, "messages", prompt.status());
    return {};
  }
  std::vector<int32_t> ids = encode_rendered(engine, fields, *prompt, input.messages.mark);
  return {std::move(prompt).value(), std::move(ids)};
}

OutputPlan add_chat(const Engine& engine, Fields& fields, ChatInput input, Request request, int64_t n,
                    GenerationCall& call) {
  ChatPrompt prompt = render_chat(engine, fields, input);
  if (!fields.ok()) return {};
  request.sampling = std::move(input.sampling);
  if (input.dialect.needs_special_tokens) request.sampling.skip_special_tokens = false;
  request.sampling.grammar =
      input.tools.is_forced
          ? constrain_calls(engine, input.dialect, prompt.text, input.tools)
          : constrain_content(engine, input.dialect, prompt.text, input.tools, request.sampling.grammar);
  add_requests(engine, call, fields, {std::move(request)}, {std::move(prompt.ids)}, n);
  return plan_output(input.dialect, prompt.text, input.tools, input.separate_reasoning);
}

}  // namespace fp4moe
