// Parses the fields of a chat request that offer functions to the model.
#pragma once

#include "fp4moe/engine.h"
#include "server/chat/output_dialect.h"
#include "server/json.h"

namespace fp4moe {

// Reads "tools", "tool_choice" and "parallel_tool_calls", or OpenAI's legacy "functions" and "function_call";
// also stores the tools in `options`.
ToolUse read_tools(const Engine& engine, const OutputDialect& dialect, Fields& fields,
                   ChatTemplateOptions& options);

}  // namespace fp4moe
