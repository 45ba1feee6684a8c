// The fields of a chat request that its template reads.
#pragma once

#include <string>

#include "fp4moe/engine.h"
#include "server/answer_dialect.h"
#include "server/json.h"

namespace fp4moe {

// "messages", as templates expect them: content is one string, arguments of tool calls are objects (or, for
// templates that join them to text, strings). JSON text.
std::string read_messages(Fields& fields, const AnswerDialect& dialect);
ChatTemplateOptions read_template_options(Fields& fields);
// "tools", "tool_choice" and "parallel_tool_calls"; the template's options have the tools, too.
ToolUse read_tools(const Engine& engine, const AnswerDialect& dialect, Fields& fields,
                   ChatTemplateOptions& options);

}  // namespace fp4moe
