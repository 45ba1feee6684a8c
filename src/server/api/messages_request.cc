#include "server/api/messages_request.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/api/messages_turns.h"

namespace fp4moe {

namespace {

// The chat's fields that are not copied, and the fields that they are translated from.
struct Translated {
  const char* chat_field;
  const char* field;  // "": the Messages API has no such field
};
constexpr Translated kTranslated[] = {
    {"messages", "messages"},
    {"tools", "tools"},
    {"tool_choice", "tool_choice"},
    {"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"},
    {"stop", "stop_sequences"},
    {"response_format", "output_config.format"},
    {"reasoning_effort", "output_config.effort"},
    {"separate_reasoning", ""},
    {"max_completion_tokens", ""},
    {"logprobs", ""},
    {"top_logprobs", ""},
};

// Fields that only the Messages API has.
constexpr const char* kOwn[] = {"system", "thinking", "stop_sequences", "output_config", "output_format"};

void fail_choice(Fields& fields, const char* name, const char* allowed, const std::string& got) {
  fields.fail(name, std::string("must be ") + allowed + ", got " + shown(got));
}

json copied_fields(const json& body) {
  json chat = json::object();
  for (const auto& item : body.items()) {
    const std::string& key = item.key();
    const bool is_translated = std::any_of(std::begin(kTranslated), std::end(kTranslated),
                                           [&](const Translated& t) { return key == t.chat_field; });
    if (!is_translated && std::find(std::begin(kOwn), std::end(kOwn), key) == std::end(kOwn))
      chat[key] = item.value();
  }
  return chat;
}

void translate_turns(const Engine& engine, Fields& fields, json& chat) {
  const json* system = fields.find("system");
  const json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty())
    return fields.fail("messages", "must be a non-empty array");
  MessagesTurns turns(engine, fields);
  if (system != nullptr) turns.add_system(*system, "system");
  for (size_t i = 0; i < messages->size() && fields.ok(); ++i)
    turns.add((*messages)[i], "messages[" + std::to_string(i) + "]");
  if (turns.ends_in_prefill() && !chat.contains("continue_final_message"))
    chat["continue_final_message"] = true;
  chat["messages"] = turns.take();
}

json translate_tool(Fields& fields, const json& tool, const std::string& name) {
  Fields inner(tool, name + ".");
  const std::string type = inner.string("type", "custom");
  if (type != "custom")
    inner.fail("type",
               unsupported(shown(type) +
                           " is a tool that Anthropic defines; this server supports only custom tools, "
                           "with a name and an input_schema"));
  json function = {{"name", inner.string("name", "")}};
  if (inner.find("description") != nullptr) function["description"] = inner.string("description", "");
  const json* schema = inner.find("input_schema");
  if (schema == nullptr) inner.fail("input_schema", "is missing");
  if (schema != nullptr) function["parameters"] = *schema;
  if (!inner.ok()) fields.fail("", inner.error());
  return {{"type", "function"}, {"function", std::move(function)}};
}

void translate_tools(Fields& fields, json& chat) {
  const json* tools = fields.find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array())
    return fields.fail("tools", std::string("must be an array, not ") + tools->type_name());
  json& translated = chat["tools"] = json::array();
  for (size_t i = 0; i < tools->size() && fields.ok(); ++i)
    translated.push_back(translate_tool(fields, (*tools)[i], "tools[" + std::to_string(i) + "]"));
}

void translate_tool_choice(Fields& fields, json& chat) {
  const json* choice = fields.find("tool_choice");
  if (choice == nullptr) return;
  Fields inner(*choice, "tool_choice.");
  const std::string type = inner.string("type", ""), name = inner.string("name", "");
  chat["parallel_tool_calls"] = !inner.boolean("disable_parallel_tool_use", false);
  if (type == "auto" || type == "none")
    chat["tool_choice"] = type;
  else if (type == "any")
    chat["tool_choice"] = "required";
  else if (type == "tool")
    chat["tool_choice"] = {{"type", "function"}, {"function", {{"name", name}}}};
  else
    fail_choice(inner, "type", R"("auto", "any", "tool" or "none")", type);
  fields.merge(inner);
}

// Sets the variables by which chat templates turn reasoning on and off: "enable_thinking" (Qwen, GLM) and
// "thinking" (DeepSeek). Templates with only an effort (gpt-oss) get the lowest one.
void switch_reasoning(bool on, json& chat) {
  json& kwargs = chat["chat_template_kwargs"];
  if (kwargs.is_null()) kwargs = json::object();
  if (!kwargs.is_object()) return;  // refused with the chat's other fields
  for (const char* name : {"enable_thinking", "thinking"}) kwargs.emplace(name, on);
  if (!on) chat["reasoning_effort"] = "low";
}

ThinkingDisplay translate_thinking(Fields& fields, json& chat) {
  const json* thinking = fields.find("thinking");
  if (thinking == nullptr) return ThinkingDisplay::kNone;
  Fields inner(*thinking, "thinking.");
  const std::string type = inner.string("type", "");
  inner.integer("budget_tokens", 0, 0, INT32_MAX);  // not enforced
  const std::string display = inner.string("display", "summarized");
  const bool is_on = type == "enabled" || type == "adaptive" || type == "between_tools";
  if (!is_on && type != "disabled")
    fail_choice(inner, "type", R"("enabled", "adaptive", "between_tools" or "disabled")", type);
  if (display != "summarized" && display != "omitted")
    fail_choice(inner, "display", R"("summarized" or "omitted")", display);
  fields.merge(inner);
  switch_reasoning(is_on, chat);
  if (!is_on) return ThinkingDisplay::kNone;
  return display == "omitted" ? ThinkingDisplay::kOmitted : ThinkingDisplay::kWhole;
}

void translate_format(Fields& fields, const json& format, const std::string& name, json& chat) {
  Fields inner(format, name + ".");
  const std::string type = inner.string("type", "");
  const json* schema = inner.find("schema");
  if (type != "json_schema") fail_choice(inner, "type", R"("json_schema")", type);
  if (schema == nullptr) inner.fail("schema", "is missing");
  if (schema != nullptr && !schema->is_object())
    inner.fail("schema", std::string("must be a JSON Schema object, not ") + schema->type_name());
  if (inner.ok()) chat["response_format"] = {{"type", "json_schema"}, {"json_schema", {{"schema", *schema}}}};
  fields.merge(inner);
}

void translate_output(Fields& fields, json& chat) {
  if (const json* format = fields.find("output_format"))
    translate_format(fields, *format, "output_format", chat);
  const json* config = fields.find("output_config");
  if (config == nullptr) return;
  Fields inner(*config, "output_config.");
  const std::string effort = inner.string("effort", "");
  inner.find("task_budget");  // a hint to the model, which it does not see
  const json* format = inner.find("format");
  if (effort == "xhigh" || effort == "max")
    chat["reasoning_effort"] = "high";
  else if (effort == "low" || effort == "medium" || effort == "high")
    chat["reasoning_effort"] = effort;
  else if (!effort.empty())
    fail_choice(inner, "effort", R"("low", "medium", "high", "xhigh" or "max")", effort);
  if (format != nullptr && chat.contains("response_format"))
    inner.fail("format", "cannot be combined with output_format, its older name");
  fields.merge(inner);
  if (format != nullptr && fields.ok()) translate_format(fields, *format, "output_config.format", chat);
}

// Accepts fields that don't affect the response, and refuses those that would need Anthropic's servers.
void skip_or_refuse(Fields& fields) {
  for (const char* name : {"betas", "cache_control", "context_management", "diagnostics", "inference_geo",
                           "metadata", "service_tier", "speed", "user_profile_id", "workspace_id"})
    fields.find(name);
  fields.refuse("container", nullptr);
  fields.refuse("mcp_servers", json::array());
}

}  // namespace

MessagesInput translate_messages(const Engine& engine, Fields& fields) {
  MessagesInput input;
  input.chat = copied_fields(fields.object());
  translate_turns(engine, fields, input.chat);
  translate_tools(fields, input.chat);
  translate_tool_choice(fields, input.chat);
  input.thinking = translate_thinking(fields, input.chat);
  translate_output(fields, input.chat);
  if (const json* stop = fields.find("stop_sequences")) input.chat["stop"] = *stop;
  skip_or_refuse(fields);
  return input;
}

std::string messages_field(const std::string& chat_field) {
  for (const Translated& t : kTranslated)
    if (chat_field == t.chat_field) return t.field;
  if (chat_field.starts_with("response_format.")) return "output_config.format";
  if (chat_field == "tool_choice.function.name") return "tool_choice.name";
  std::string name = chat_field;
  if (!name.starts_with("tools[")) return name;
  for (const auto& [chat, own] : {std::pair{".function.parameters", ".input_schema"}, {".function", ""}})
    if (const size_t at = name.find(chat); at != name.npos) {
      name.replace(at, std::char_traits<char>::length(chat), own);
      break;
    }
  return name;
}

}  // namespace fp4moe
