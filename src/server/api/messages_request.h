// Translates a request to Anthropic's Messages API into the fields of a chat completion.
#pragma once

#include <string>

#include "fp4moe/engine.h"
#include "server/json.h"

namespace fp4moe {

// How a response shows reasoning.
enum class ThinkingDisplay {
  kNone,     // no thinking blocks: the request did not turn thinking on
  kOmitted,  // thinking blocks without text
  kWhole,
};

struct MessagesInput {
  json chat;  // the body of a chat completion; fields with the same name and meaning are copied
  ThinkingDisplay thinking = ThinkingDisplay::kNone;
};

// Records errors in `fields`; if there is one, discard the result.
MessagesInput translate_messages(const Engine& engine, Fields& fields);

// The field of the Messages request that a field of MessagesInput::chat came from, for
// Fields::merge_translated.
// "": none.
std::string messages_field(const std::string& chat_field);

}  // namespace fp4moe
