#include <utility>

#include "server/api/chat_format.h"
#include "server/api/chat_messages.h"
#include "server/chat/grammar_fields.h"

namespace fp4moe {

GenerationCall parse_chat(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<ChatFormat>(engine);
  const OutputDialect dialect = detect_dialect(engine);
  const ChatMessages messages = read_messages(engine, fields, dialect);
  ChatTemplateOptions options = read_template_options(fields);
  const ToolUse tools = read_tools(engine, dialect, fields, options);
  const bool separate_reasoning = fields.boolean("separate_reasoning", true);

  SamplingParams sampling = read_sampling(fields, engine.info().default_sampling);
  sampling.grammar = read_grammar(engine, fields);
  read_response_format(engine, fields, sampling.grammar);
  if (tools.is_forced && sampling.grammar.kind != GrammarSpec::Kind::kNone)
    fields.fail("tool_choice", "requires a tool call, but another field constrains the output text");
  const int64_t max_tokens = fields.integer("max_tokens", engine.info().context_length, 0, INT32_MAX);
  sampling.max_new_tokens = fields.integer("max_completion_tokens", max_tokens, 0, INT32_MAX);
  format->logprobs = fields.boolean("logprobs", false);
  const int64_t top = fields.integer("top_logprobs", 0, 0, kMaxTopLogprobs);
  if (top > 0 && !format->logprobs) fields.fail("top_logprobs", "requires \"logprobs\": true");
  if (format->logprobs) sampling.top_logprobs = static_cast<int32_t>(top);
  Request request;
  format->read(call, fields, request);
  if (!fields.ok()) return call;

  const Result<std::string> prompt = engine.apply_chat_template(messages.text, options);
  if (!prompt.ok()) {
    fail_text(fields, "messages", prompt.status());
    return call;
  }
  format->plan = plan_output(dialect, *prompt, tools, separate_reasoning);
  format->parallel_calls = tools.parallel;
  if (dialect.needs_special_tokens) sampling.skip_special_tokens = false;
  sampling.grammar = tools.is_forced ? constrain_calls(engine, dialect, *prompt, tools)
                                     : constrain_content(engine, dialect, *prompt, sampling.grammar);
  auto ids = encode_rendered(engine, fields, *prompt, messages.mark);
  request.sampling = sampling;
  add_requests(engine, call, fields, request, {std::move(ids)}, format->n());
  OpenAiFormat::check_experts(fields, call);
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
