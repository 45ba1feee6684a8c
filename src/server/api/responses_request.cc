#include "server/api/responses_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <utility>

#include "server/chat/output_dialect.h"

namespace fp4moe {

namespace {

constexpr int64_t kMaxConversationBytes = int64_t{128} << 20;  // as parsed JSON, as for a request's body

// Fields of /v1/responses that are translated, and those of a chat completion that the translation writes.
// All other fields have the same name in both APIs.
constexpr std::array<std::string_view, 31> kNotCopied = {"background",
                                                         "client_metadata",
                                                         "conversation",
                                                         "enable_response_messages",
                                                         "include",
                                                         "input",
                                                         "instructions",
                                                         "logprobs",
                                                         "max_completion_tokens",
                                                         "max_output_tokens",
                                                         "max_tokens",
                                                         "max_tool_calls",
                                                         "messages",
                                                         "metadata",
                                                         "model",
                                                         "n",
                                                         "previous_input_messages",
                                                         "previous_response_id",
                                                         "prompt",
                                                         "reasoning",
                                                         "reasoning_effort",
                                                         "response_format",
                                                         "store",
                                                         "stream",
                                                         "stream_options",
                                                         "text",
                                                         "tool_choice",
                                                         "tools",
                                                         "top_logprobs",
                                                         "truncation",
                                                         "user"};

void check_choice(Fields& fields, const std::string& name, const std::string& value,
                  const std::vector<std::string>& legal) {
  if (value.empty() || std::find(legal.begin(), legal.end(), value) != legal.end()) return;
  std::string list;
  for (const std::string& one : legal) list += (list.empty() ? "\"" : ", \"") + one + "\"";
  fields.fail(name, "must be one of " + list + ", got " + shown(value));
}

void read_tools(Fields& fields, ResponsesRequest& request) {
  ResponseTools& tools = request.tools = read_response_tools(fields);
  request.head["tools"] = std::move(tools.given);
  const json* choice = fields.find("tool_choice");
  request.head["tool_choice"] = choice == nullptr ? json("auto") : *choice;
  request.head["parallel_tool_calls"] = fields.boolean("parallel_tool_calls", true);
  request.chat["tools"] = std::move(tools.functions);
  if (!tools.choice.is_null()) request.chat["tool_choice"] = std::move(tools.choice);
}

// "text.format" as a chat completion's response_format.
void read_text_format(Fields& text, ResponsesRequest& request) {
  const json* format = text.find("format");
  request.head["text"]["format"] = format == nullptr ? json{{"type", "text"}} : *format;
  if (format == nullptr) return;
  Fields inner(*format, "text.format.");
  const std::string type = inner.string("type", "");
  if (inner.ok() && type != "text" && type != "json_object" && type != "json_schema")
    inner.fail("type", "must be \"text\", \"json_object\" or \"json_schema\", got " + shown(type));
  json& chat = request.chat["response_format"] = {{"type", type}};
  for (const char* part : {"name", "description", "schema", "strict"})
    if (const json* given = inner.find(part); given != nullptr && type == "json_schema")
      chat["json_schema"][part] = *given;
  text.merge(inner);
}

void read_text_and_reasoning(Fields& fields, ResponsesRequest& request) {
  const json none = json::object();
  const json* given = fields.find("text");
  Fields text(given == nullptr ? none : *given, "text.");
  request.head["text"] = json::object();
  read_text_format(text, request);
  const std::string verbosity = text.string("verbosity", "");
  check_choice(text, "verbosity", verbosity, {"low", "medium", "high"});
  if (!verbosity.empty()) request.head["text"]["verbosity"] = verbosity;
  fields.merge(text);

  given = fields.find("reasoning");
  Fields reasoning(given == nullptr ? none : *given, "reasoning.");
  const std::string effort = reasoning.string("effort", "");
  if (!effort.empty()) request.chat["reasoning_effort"] = effort;
  for (const char* name : {"summary", "generate_summary"})
    check_choice(reasoning, name, reasoning.string(name, ""), {"auto", "concise", "detailed"});
  request.head["reasoning"] = {{"effort", effort.empty() ? json(nullptr) : json(effort)},
                               {"summary", nullptr}};
  fields.merge(reasoning);
}

// Reads "include" and "top_logprobs".
void read_logprobs(Fields& fields, ResponsesRequest& request) {
  bool wanted = false;
  for (const std::string& name : fields.strings("include")) {
    check_choice(fields, "include", name, {"message.output_text.logprobs", "reasoning.encrypted_content"});
    wanted |= name == "message.output_text.logprobs";
  }
  const json* top = fields.find("top_logprobs");
  request.head["top_logprobs"] = top == nullptr ? json(0) : *top;
  if (top != nullptr) request.chat["top_logprobs"] = *top;
  request.chat["logprobs"] = wanted || (top != nullptr && *top != 0);
}

// Refuses the fields that this server does not implement, and reads those that only the response shows.
void read_rest(Fields& fields, ResponsesRequest& request) {
  fields.refuse("background", false);
  // "auto" has no effect on an input that fits; any other is refused, as "disabled" demands.
  check_choice(fields, "truncation", fields.string("truncation", ""), {"auto", "disabled"});
  fields.refuse("conversation", nullptr);
  fields.refuse("prompt", nullptr);
  fields.refuse("enable_response_messages", false);  // vLLM's, and the next one
  fields.refuse("previous_input_messages", nullptr);
  const int64_t calls = fields.integer("max_tool_calls", 0, 1, INT32_MAX);  // of built-in tools: no effect
  fields.find("client_metadata");                                           // Codex's: no effect
  if (const json* options = fields.find("stream_options")) {
    Fields inner(*options, "stream_options.");
    inner.boolean("include_obfuscation", false);  // no effect: a fp4moe stream has no padding
    fields.merge(inner);
  }
  json metadata = json::object();
  if (const json* given = fields.find("metadata")) {
    if (!given->is_object() ||
        !std::all_of(given->begin(), given->end(), [](const json& v) { return v.is_string(); }))
      fields.fail("metadata", "must be an object of strings, got " + shown(*given));
    metadata = *given;
  }
  const auto text_or_null = [&](const char* name) {
    const std::string text = fields.string(name, "");
    return text.empty() ? json(nullptr) : json(text);
  };
  const json* max_tokens = fields.find("max_output_tokens");
  if (max_tokens != nullptr) request.chat["max_completion_tokens"] = *max_tokens;
  request.stream = fields.boolean("stream", false);
  json& head = request.head;
  head["max_output_tokens"] = max_tokens == nullptr ? json(nullptr) : *max_tokens;
  head["max_tool_calls"] = calls == 0 ? json(nullptr) : json(calls);
  head["metadata"] = std::move(metadata);
  head["background"] = false;
  head["truncation"] = "disabled";
  head["service_tier"] = "default";
  for (const char* name : {"user", "prompt_cache_key", "safety_identifier"}) head[name] = text_or_null(name);
}

// Finds the response that this one continues.
void read_previous(const ResponseAccess& access, Fields& fields, ResponsesRequest& request) {
  const std::string name = "previous_response_id", id = fields.string(name, "");
  request.is_stored = fields.boolean("store", true) && access.store.is_on();
  request.head["store"] = request.is_stored;
  request.head[name] = id.empty() ? json(nullptr) : json(id);
  if (id.empty()) return;
  if (!id.starts_with(kResponseIdPrefix))
    return fields.fail(name,
                       shown(id) + " is not a response id: it must start with \"" + kResponseIdPrefix + "\"");
  if (!access.store.is_on())
    return fields.fail(name, unsupported("needs stored responses, which --max-stored-response-bytes 0 turns "
                                         "off; send the whole conversation as input"));
  const auto previous = access.store.find(access.owner, id);
  if (previous == nullptr) {
    return fields.fail(name, no_such_response(id));
  }
  const int64_t bytes = previous->turn->conversation_parsed_bytes();
  if (bytes > kMaxConversationBytes)
    return fields.fail(name, does_not_fit("the stored conversation takes " + std::to_string(bytes) +
                                          " bytes of memory as parsed JSON; the limit is " +
                                          std::to_string(kMaxConversationBytes)));
  if (access.hold_bytes(bytes, fields, name)) request.previous = previous->turn;
}

// The messages of the instructions, the stored conversation and the new items.
json conversation_messages(const Engine& engine, Fields& fields, ResponsesRequest& request) {
  const std::string instructions = fields.string("instructions", "");
  request.head["instructions"] = instructions.empty() ? json(nullptr) : json(instructions);
  // gpt-oss's template puts the text of a message with calls into the reasoning.
  ItemMessages messages(detect_dialect(engine).calls == CallSyntax::kHarmony);
  if (!instructions.empty()) messages.add_system(instructions);
  if (request.previous != nullptr)
    for (const Turn* turn : request.previous->conversation())
      for (const auto* items : {&turn->input(), &turn->output()})
        for (const StoredItem& item : *items) messages.add(json::parse(item.text));
  for (size_t i = 0; i < request.input.size(); ++i) {
    const json& item = request.input[i];
    if (item["type"] == "function_call_output" &&
        !messages.has_call(item["call_id"].get_ref<const std::string&>()))
      fields.fail("input[" + std::to_string(i) + "].call_id",
                  "no function_call with the call_id " + shown(item["call_id"]) + " precedes it");
    messages.add(item);
  }
  return messages.take();
}

}  // namespace

ResponsesRequest read_responses_request(const Engine& engine, const ResponseAccess& access, Fields& fields) {
  ResponsesRequest request;
  for (const auto& item : fields.object().items())
    if (std::find(kNotCopied.begin(), kNotCopied.end(), item.key()) == kNotCopied.end())
      request.chat[item.key()] = item.value();
  read_tools(fields, request);
  read_text_and_reasoning(fields, request);
  read_logprobs(fields, request);
  read_rest(fields, request);
  read_previous(access, fields, request);
  request.input = read_items(access, fields, engine.info().context_length);
  if (fields.ok()) request.chat["messages"] = conversation_messages(engine, fields, request);
  return request;
}

std::string responses_name(const ResponsesRequest& request, const std::string& chat) {
  static const std::pair<std::string, std::string> kNames[] = {
      {"response_format.json_schema", "text.format"},
      {"response_format", "text.format"},
      {"reasoning_effort", "reasoning.effort"},
      {"max_completion_tokens", "max_output_tokens"},
      {"max_tokens", "max_output_tokens"},
      {"logprobs", ""},
  };
  if (chat.starts_with("messages")) return "input";  // the items of `input` were checked one by one
  for (const auto& [own, name] : kNames)
    if (chat.starts_with(own)) return name.empty() ? name : name + chat.substr(own.size());
  static const std::string kTool = "tools[", kFunction = ".function";
  const size_t at = chat.starts_with("tool") ? chat.find(kFunction) : std::string::npos;
  const std::string rest = at == std::string::npos ? "" : chat.substr(at + kFunction.size());
  if (!chat.starts_with(kTool)) return at == std::string::npos ? chat : chat.substr(0, at) + rest;
  size_t index = 0;
  std::from_chars(chat.data() + kTool.size(), chat.data() + chat.size(), index);
  return index < request.tools.places.size() ? request.tools.places[index] + rest : chat;
}

}  // namespace fp4moe
