// The fields of a chat request that its template reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/engine.h"
#include "server/answer_dialect.h"
#include "server/json.h"

namespace fp4moe {

// "messages", as templates expect them: content is one string, arguments of tool calls are objects (or, for
// templates that join them to text, strings).
struct ChatMessages {
  std::string text;  // JSON
  // Stands inside of special tokens' texts that users and tools have written, so that these stay texts: none
  // of them can end its message or begin another one. Empty: there are none.
  std::string mark;
};
ChatMessages read_messages(const Engine& engine, Fields& fields, const AnswerDialect& dialect);
// The ids of a prompt that was rendered from them, without the mark.
std::vector<int32_t> encode_rendered(const Engine& engine, Fields& fields, const std::string& prompt,
                                     const std::string& mark);
ChatTemplateOptions read_template_options(Fields& fields);
// "tools", "tool_choice" and "parallel_tool_calls"; the template's options have the tools, too.
ToolUse read_tools(const Engine& engine, const AnswerDialect& dialect, Fields& fields,
                   ChatTemplateOptions& options);

}  // namespace fp4moe
