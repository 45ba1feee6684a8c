#include "server/api/messages_turns.h"

#include <utility>

namespace fp4moe {

namespace {

void append_line(json& text, std::string more) {
  if (text.is_null())
    text = std::move(more);
  else
    text.get_ref<std::string&>() += "\n" + more;
}

std::string block_name(const std::string& name, size_t index) {
  return name + "[" + std::to_string(index) + "]";
}

// Claude Code puts a line with a hash of the request in front of its system prompt. It would make every
// prompt differ from the cached ones.
bool is_billing_line(const std::string& text) {
  return text.starts_with("x-anthropic-billing-header") && text.find('\n') == text.npos;
}

}  // namespace

json& MessagesTurns::turn(const std::string& role) {
  if (messages_.empty() || messages_.back()["role"] != role)
    messages_.push_back({{"role", role}, {"content", nullptr}});
  return messages_.back();
}

void MessagesTurns::append_system(json& text, const json& content, const std::string& name) {
  const auto append = [&text](std::string more) {
    if (!is_billing_line(more)) append_line(text, std::move(more));
  };
  if (content.is_string()) return append(content.get<std::string>());
  if (!content.is_array())
    return fields_.fail(
        name, std::string("must be a string or an array of text blocks, not ") + content.type_name());
  for (size_t i = 0; i < content.size() && fields_.ok(); ++i)
    append(text_in(content[i], block_name(name, i), "the system prompt"));
}

// Whether the template renders a system message behind another message. Some templates refuse it, and
// gpt-oss's ignores it.
bool MessagesTurns::renders_late_system() {
  if (!renders_late_system_) {
    const json probe = json::array(
        {json{{"role", "user"}, {"content", "first"}}, json{{"role", "system"}, {"content", "second"}}});
    const Result<std::string> text = engine_.apply_chat_template(to_text(probe), {});
    renders_late_system_ =
        text.ok() && text->find("first") < text->find("second") && text->find("second") != text->npos;
  }
  return *renders_late_system_;
}

void MessagesTurns::add_late_system(const json& content, const std::string& name) {
  if (messages_.empty() || !renders_late_system()) return append_system(system_, content, name);
  json text;
  append_system(text, content, name);
  if (!text.is_null()) append_line(turn("system")["content"], text.get<std::string>());
}

void MessagesTurns::add(const json& message, const std::string& name) {
  if (!is_object(message, name)) return;
  const std::string role = string_in(message, "role", name);
  const auto content = message.find("content");
  if (fields_.ok() && content == message.end()) fields_.fail(name + ".content", "is missing");
  if (!fields_.ok()) return;
  if (role == "system") return add_late_system(*content, name + ".content");
  if (role != "user" && role != "assistant")
    return fields_.fail(name + ".role", R"(must be "user", "assistant" or "system", got )" + shown(role));
  if (content->is_string()) return append_line(turn(role)["content"], content->get<std::string>());
  if (!content->is_array())
    return fields_.fail(name + ".content",
                        std::string("must be a string or an array of blocks, not ") + content->type_name());
  for (size_t i = 0; i < content->size() && fields_.ok(); ++i)
    add_block(role, (*content)[i], block_name(name + ".content", i));
}

void MessagesTurns::add_block(const std::string& role, const json& block, const std::string& name) {
  if (!is_object(block, name)) return;
  const std::string type = string_in(block, "type", name);
  const bool is_assistant = role == "assistant";
  if (is_assistant && type == "tool_use") return add_call(block, name);
  if (!is_assistant && type == "tool_result") return add_result(block, name);
  if (is_assistant && type == "redacted_thinking") return;  // encrypted for Anthropic's models
  if (is_assistant && type == "thinking")
    return append_line(turn(role)["reasoning_content"], string_in(block, "thinking", name));
  std::string text = text_in(block, name, is_assistant ? "an assistant message" : "a user message");
  if (fields_.ok()) append_line(turn(role)["content"], std::move(text));
}

void MessagesTurns::add_call(const json& block, const std::string& name) {
  const std::string id = string_in(block, "id", name), function = string_in(block, "name", name);
  const json input = block.value("input", json());
  if (!is_object(input, name + ".input")) return;
  turn("assistant")["tool_calls"].push_back(
      {{"id", id}, {"type", "function"}, {"function", {{"name", function}, {"arguments", input}}}});
}

void MessagesTurns::add_result(const json& block, const std::string& name) {
  const std::string id = string_in(block, "tool_use_id", name);
  const json is_error = block.value("is_error", json());
  if (!is_error.is_null() && !is_error.is_boolean())
    fields_.fail(name + ".is_error", std::string("must be a boolean, not ") + is_error.type_name());
  std::string text = result_text(block, name + ".content");
  if (is_error == true) text.insert(0, "Error: ");
  if (fields_.ok())
    messages_.push_back({{"role", "tool"}, {"tool_call_id", id}, {"content", std::move(text)}});
}

std::string MessagesTurns::result_text(const json& block, const std::string& name) {
  const auto content = block.find("content");
  if (content == block.end() || content->is_null()) return "";
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) {
    fields_.fail(name,
                 std::string("must be a string or an array of text blocks, not ") + content->type_name());
    return "";
  }
  json text;
  for (size_t i = 0; i < content->size() && fields_.ok(); ++i)
    append_line(text, text_in((*content)[i], block_name(name, i), "a tool result"));
  return text.is_null() ? "" : text.get<std::string>();
}

bool MessagesTurns::is_object(const json& value, const std::string& name) {
  if (!value.is_object()) fields_.fail(name, std::string("must be an object, not ") + value.type_name());
  return fields_.ok();
}

std::string MessagesTurns::string_in(const json& object, const char* key, const std::string& name) {
  const auto value = object.find(key);
  if (value != object.end() && value->is_string()) return value->get<std::string>();
  fields_.fail(name + "." + key, value == object.end()
                                     ? "is missing"
                                     : std::string("must be a string, not ") + value->type_name());
  return "";
}

std::string MessagesTurns::text_in(const json& block, const std::string& name, const char* place) {
  if (!is_object(block, name)) return "";
  const std::string type = string_in(block, "type", name);
  if (type == "text") return string_in(block, "text", name);
  fields_.fail(name + ".type",
               unsupported(shown(type) + " is not supported in " + place +
                           ": this server reads text blocks, tool_result blocks of users, and thinking and "
                           "tool_use blocks of the assistant"));
  return "";
}

bool MessagesTurns::ends_in_prefill() const {
  if (messages_.empty()) return false;
  const json& last = messages_.back();
  return last["role"] == "assistant" && last["content"].is_string() && !last.contains("tool_calls");
}

json MessagesTurns::take() {
  if (!system_.is_null())
    messages_.insert(messages_.begin(), json{{"role", "system"}, {"content", std::move(system_)}});
  return std::exchange(messages_, json::array());
}

}  // namespace fp4moe
