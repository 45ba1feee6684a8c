#include "server/api/apis.h"
#include "server/api/chat_call.h"
#include "server/api/messages_format.h"
#include "server/api/messages_request.h"

namespace fp4moe {

GenerationCall parse_messages(const Engine& engine, Fields& fields) {
  GenerationCall call;
  Request request;
  read_identity(fields, "msg_", request);
  call.stream = fields.boolean("stream", false);
  if (fields.find("max_tokens") == nullptr) fields.fail("max_tokens", "is missing");
  const MessagesInput messages = translate_messages(engine, fields);
  if (!fields.ok()) return call;

  auto format = std::make_unique<MessagesFormat>(request.id, engine.info().name);
  format->thinking = messages.thinking;
  Fields chat(messages.chat);
  ChatInput input = read_chat_input(engine, chat);
  for (ToolUse::Function& f : input.tools.functions) f.place = messages_field(f.place);
  format->parallel_calls = input.tools.parallel;
  format->max_tokens = input.sampling.max_new_tokens;
  if (chat.ok()) format->plan = add_chat(engine, chat, std::move(input), std::move(request), 1, call);
  fields.merge_translated(chat, messages_field);
  call.format = std::move(format);
  return call;
}

int64_t count_message_tokens(const Engine& engine, Fields& fields) {
  const MessagesInput messages = translate_messages(engine, fields);
  if (!fields.ok()) return 0;
  Fields chat(messages.chat);
  const ChatInput input = read_chat_input(engine, chat);
  const int64_t count = chat.ok() ? std::ssize(render_chat(engine, chat, input).ids) : 0;
  fields.merge_translated(chat, messages_field);
  return count;
}

}  // namespace fp4moe
