// Parses the fields of a chat request that its template uses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/chat/output_dialect.h"
#include "server/json.h"

namespace fp4moe {

// "messages" in the form templates expect: content is one string; tool-call arguments are objects (or
// strings, for templates that concatenate them).
struct ChatMessages {
  std::string text;  // JSON
  // Inserted into special-token texts in user and tool messages, so that they are tokenized as plain text and
  // cannot end a message or begin another one. Empty if there are none.
  std::string mark;
};
ChatMessages read_messages(const Engine& engine, Fields& fields, const OutputDialect& dialect);
// A prompt rendered from ChatMessages, without the marks.
std::string without_marks(std::string prompt, const std::string& mark);
// Tokenizes such a prompt, without the marks.
std::vector<int32_t> encode_rendered(const Engine& engine, Fields& fields, const std::string& prompt,
                                     const std::string& mark);
ChatTemplateOptions read_template_options(Fields& fields);

}  // namespace fp4moe
