#include "server/api/chat_tools.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace fp4moe {

namespace {

constexpr size_t kMaxTools = 128;      // OpenAI's limit
constexpr size_t kMaxNameBytes = 128;  // Anthropic's limit; OpenAI's is 64

// A function's name and parameters; `prefix` precedes the names of its fields in errors.
ToolUse::Function read_function(Fields& fields, const json& given, const std::string& prefix) {
  Fields inner(given, prefix);
  ToolUse::Function function{inner.string("name", ""), json::object(), prefix + "parameters"};
  if (inner.ok() && (function.name.empty() || function.name.size() > kMaxNameBytes))
    inner.fail("name", "has " + std::to_string(function.name.size()) + " bytes; the allowed length is 1 to " +
                           std::to_string(kMaxNameBytes));
  const bool is_word = std::all_of(function.name.begin(), function.name.end(), [](unsigned char c) {
    return c == '_' || c == '-' || c == '.' || (c < 128 && std::isalnum(c) != 0);
  });
  if (!is_word) inner.fail("name", "must contain only letters, digits, '_', '-' and '.'");
  for (const char* moot : {"description", "strict"}) inner.find(moot);
  if (const json* parameters = inner.find("parameters")) {
    if (!parameters->is_object())
      inner.fail("parameters", std::string("must be a JSON Schema object, not ") + parameters->type_name());
    function.parameters = *parameters;
  }
  if (!function.parameters.is_object() || function.parameters.empty())
    function.parameters = {{"type", "object"}};
  fields.merge(inner);
  return function;
}

ToolUse::Function read_tool(Fields& fields, const json& tool, const std::string& name) {
  const json none = json::object();
  Fields outer(tool, name + ".");
  if (outer.ok() && outer.string("type", "function") != "function")
    outer.fail("type", unsupported("must be \"function\""));
  const json* given = outer.find("function");
  fields.merge(outer);
  return read_function(fields, given == nullptr ? none : *given, name + ".function.");
}

// Reads the name of the function that tool_choice requires.
std::string named_function(Fields& fields, const json& choice) {
  const json none = json::object();
  Fields outer(choice, "tool_choice.");
  if (outer.ok() && outer.string("type", "") != "function")
    outer.fail("type", unsupported("must be \"function\""));
  const json* given = outer.find("function");
  Fields inner(given == nullptr ? none : *given, "tool_choice.function.");
  const std::string name = inner.string("name", "");
  fields.merge(outer);
  fields.merge(inner);
  return name;
}

// Reads the legacy "function_call": {"name": string}.
std::string legacy_function(Fields& fields, const json& choice) {
  Fields inner(choice, "function_call.");
  const std::string name = inner.string("name", "");
  fields.merge(inner);
  return name;
}

void read_tool_choice(const Engine& engine, Fields& fields, ToolUse& use) {
  const std::string field = use.is_legacy ? "function_call" : "tool_choice";
  const json* choice = fields.find(field);
  if (choice == nullptr || *choice == "auto") return;
  if (*choice == "none") return use.functions.clear();
  use.is_forced = true;
  if (use.functions.empty()) return fields.fail(field, "requires a tool call, but there are no tools");
  if (!engine.info().has_grammars)
    return fields.fail(field, unsupported("must be \"auto\" or \"none\": a call can only be forced with a "
                                          "grammar backend, and this server has none"));
  if (*choice == "required" && !use.is_legacy) return;
  if (!choice->is_object())
    return fields.fail(field, use.is_legacy
                                  ? "must be \"auto\", \"none\" or {\"name\": string}"
                                  : "must be \"auto\", \"none\", \"required\" or {\"type\": \"function\", "
                                    "\"function\": {\"name\": string}}");
  const std::string name = use.is_legacy ? legacy_function(fields, *choice) : named_function(fields, *choice);
  std::erase_if(use.functions, [&](const ToolUse::Function& f) { return f.name != name; });
  use.parallel = false;
  if (use.functions.empty())
    fields.fail(use.is_legacy ? "function_call.name" : "tool_choice.function.name",
                "is not one of the tools: " + shown(name));
}

// Whether "tools" or the legacy "functions" is an array of an allowed size.
bool is_tool_list(Fields& fields, const std::string& name, const json& list) {
  if (!list.is_array()) {
    fields.fail(name, std::string("must be an array, not ") + list.type_name());
  } else if (list.size() > kMaxTools) {
    fields.fail(name,
                "has " + std::to_string(list.size()) + " entries; the limit is " + std::to_string(kMaxTools));
  }
  return fields.ok();
}

void read_current_tools(Fields& fields, const json& tools, ToolUse& use, ChatTemplateOptions& options) {
  if (!is_tool_list(fields, "tools", tools)) return;
  for (size_t i = 0; fields.ok() && i < tools.size(); ++i)
    use.functions.push_back(read_tool(fields, tools[i], "tools[" + std::to_string(i) + "]"));
  if (!tools.empty()) options.tools_json = to_text(tools);
}

// OpenAI's fields before there were tools: at most one call, in the response's "function_call".
void read_legacy_functions(Fields& fields, const json& functions, ToolUse& use,
                           ChatTemplateOptions& options) {
  if (!is_tool_list(fields, "functions", functions)) return;
  json tools = json::array();
  for (size_t i = 0; fields.ok() && i < functions.size(); ++i) {
    use.functions.push_back(read_function(fields, functions[i], "functions[" + std::to_string(i) + "]."));
    tools.push_back({{"type", "function"}, {"function", functions[i]}});
  }
  if (!tools.empty()) options.tools_json = to_text(tools);
  use.is_legacy = true;
}

}  // namespace

ToolUse read_tools(const Engine& engine, const OutputDialect& dialect, Fields& fields,
                   ChatTemplateOptions& options) {
  ToolUse use;
  const json* tools = fields.find("tools");
  const json* functions = fields.find("functions");
  if (tools != nullptr) {
    read_current_tools(fields, *tools, use, options);
  } else if (functions != nullptr) {
    read_legacy_functions(fields, *functions, use, options);
  }
  use.parallel = fields.boolean("parallel_tool_calls", true) && !use.is_legacy;
  read_tool_choice(engine, fields, use);
  if (use.functions.empty()) options.tools_json.clear();
  if (!use.functions.empty() && !use.is_forced && !dialect.shows_tools)
    fields.fail(use.is_legacy ? "function_call" : "tool_choice",
                unsupported("must force a call or be \"none\": the model's chat template has no place for "
                            "tools, so with \"auto\" the model would not see them (--chat-template "
                            "selects a different template)"));
  return use;
}

}  // namespace fp4moe
