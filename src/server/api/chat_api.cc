#include "server/api/chat_call.h"
#include "server/api/chat_format.h"

namespace fp4moe {

GenerationCall parse_chat(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<ChatFormat>(engine);
  ChatInput input = read_chat_input(engine, fields);
  format->logprobs = input.sampling.top_logprobs >= 0;
  format->parallel_calls = input.tools.parallel;
  format->legacy_calls = input.tools.is_legacy;
  format->includes_reasoning = fields.boolean("include_reasoning", true);
  Request request;
  format->read(call, fields, request);
  if (!fields.ok()) return call;
  format->plan = add_chat(engine, fields, std::move(input), std::move(request), format->n(), call);
  OpenAiFormat::check_experts(fields, call);
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
