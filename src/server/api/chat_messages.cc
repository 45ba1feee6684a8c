#include "server/api/chat_messages.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "server/api/apis.h"

namespace fp4moe {

namespace {

void join_content(json& content, Fields& fields, const std::string& name) {
  if (content.is_null()) content = "";
  if (content.is_array()) {
    std::string text;
    for (size_t j = 0; j < content.size(); ++j) {
      const json& part = content[j];
      const std::string part_name = name + "[" + std::to_string(j) + "]";
      if (part.is_object() && part.value("type", json()).is_string() && part["type"] != "text")
        return fields.fail(
            part_name + ".type",
            shown(part["type"]) +
                " is not supported here: this model reads text only, as parts of type \"text\"");
      if (!part.is_object() || part.value("type", json()) != "text" ||
          !part.value("text", json()).is_string())
        return fields.fail(part_name,
                           "must be {\"type\": \"text\", \"text\": string}: this model reads text only");
      text += (j > 0 ? " " : "") + part["text"].get<std::string>();
    }
    content = std::move(text);
  }
  if (!content.is_string())
    fields.fail(name, std::string("must be a string or an array of text parts, not ") + content.type_name());
}

void normalise_calls(json& calls, bool as_text, Fields& fields, const std::string& name) {
  if (calls.is_null()) return;
  if (!calls.is_array()) return fields.fail(name, std::string("must be an array, not ") + calls.type_name());
  for (size_t j = 0; j < calls.size(); ++j) {
    json& call = calls[j];
    const bool has_name = call.is_object() && call.contains("function") && call["function"].is_object() &&
                          call["function"].value("name", json()).is_string();
    if (!has_name)
      return fields.fail(name + "[" + std::to_string(j) + "]",
                         "must be {\"type\": \"function\", \"function\": {\"name\", \"arguments\"}}");
    json& arguments = call["function"]["arguments"];  // operator[] inserts null if absent
    if (arguments.is_null()) arguments = json::object();
    if (as_text) {
      if (!arguments.is_string()) arguments = to_text(arguments);
    } else if (arguments.is_string()) {
      if (auto parsed = parse_json(arguments.get<std::string>()); parsed.ok())
        arguments = std::move(parsed).value();
    }
  }
}

// Checks the role, and that a user message has content. Templates drop messages of other roles, or write the
// role where they expect special tokens.
void check_role(const json& message, Fields& fields, const std::string& name) {
  constexpr std::string_view kRoles[] = {"system", "developer", "user", "assistant", "tool", "function"};
  const std::string& role = message["role"].get_ref<const std::string&>();
  if (std::find(std::begin(kRoles), std::end(kRoles), role) == std::end(kRoles))
    fields.fail(name + ".role",
                R"(must be "system", "developer", "user", "assistant", "tool" or "function", got )" +
                    shown(message["role"]));
  if (role == "user" && message.value("content", json()).is_null())
    fields.fail(name + ".content", "is missing: a user message needs it");
}

void normalise_message(json& message, const OutputDialect& dialect, Fields& fields, const std::string& name) {
  if (!message.is_object())
    return fields.fail(name, std::string("must be an object, not ") + message.type_name());
  if (!message.contains("role") || !message["role"].is_string())
    return fields.fail(name + ".role", "must be a string");
  check_role(message, fields, name);
  if (message["role"] == "developer" && !dialect.has_developer_role) message["role"] = "system";
  if (message["role"] == "function") message["role"] = "tool";  // the legacy name
  if (message.contains("function_call") && !message.contains("tool_calls")) {
    if (!message["function_call"].is_null())
      message["tool_calls"] = {{{"type", "function"}, {"function", message["function_call"]}}};
    message.erase("function_call");
  }
  join_content(message["content"], fields, name + ".content");
  if (message.contains("tool_calls"))
    normalise_calls(message["tool_calls"], dialect.calls == CallSyntax::kDeepSeek, fields,
                    name + ".tool_calls");
  if (dialect.names_thinking && message.contains("reasoning_content") && !message.contains("thinking"))
    message["thinking"] = message["reasoning_content"];
}

// A Unicode noncharacter that does not occur in the text; empty if all of them do.
std::string free_mark(const std::string& text) {
  for (int last = 0x90; last <= 0xAF; ++last)  // U+FDD0 to U+FDEF
    if (std::string mark = {'\xEF', '\xB7', static_cast<char>(last)}; text.find(mark) == std::string::npos)
      return mark;
  return "";
}

size_t count_marks(const std::string& text, const std::string& mark) {
  size_t count = 0;
  for (size_t at = text.find(mark); at != text.npos; at = text.find(mark, at + mark.size())) ++count;
  return count;
}

size_t first_character(std::string_view text) {
  size_t size = 1;
  while (size < text.size() && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) ++size;
  return size;
}

// The sorted texts of the special tokens that the tokenizer finds in `text`, without those of a single
// character, which cannot be split.
std::vector<std::string> specials_in(const Engine& engine, const std::string& text) {
  std::vector<std::string> specials;
  for (const int32_t id : engine.find_special_tokens(text)) specials.push_back(engine.token_bytes(id));
  std::erase_if(specials, [](const std::string& s) { return first_character(s) >= s.size(); });
  std::sort(specials.begin(), specials.end());
  return specials;
}

// Whether any of the sorted `specials` is a prefix of the text at `at`.
bool begins_special(const std::vector<std::string>& specials, const std::string& text, size_t at) {
  auto begin = specials.begin(), end = specials.end();  // the specials that match so far
  for (size_t i = 0; begin != end; ++i) {
    if (begin->size() == i) return true;
    if (at + i == text.size()) return false;
    const char next = text[at + i];
    const auto byte = [i](const std::string& s) { return static_cast<unsigned char>(s[i]); };
    begin = std::partition_point(
        begin, end, [&](const std::string& s) { return byte(s) < static_cast<unsigned char>(next); });
    end = std::partition_point(
        begin, end, [&](const std::string& s) { return byte(s) == static_cast<unsigned char>(next); });
  }
  return false;
}

// `text` with the mark after the first character of each occurrence of a special.
std::string with_marks(const std::string& text, const std::vector<std::string>& specials,
                       const std::string& mark) {
  std::string broken;
  broken.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const size_t size = first_character(std::string_view(text).substr(i));
    broken.append(text, i, size);
    if (begins_special(specials, text, i)) broken += mark;
    i += size;
  }
  return broken;
}

// `text` with the mark before and after each non-ASCII character.
std::string with_marks_around_others(const std::string& text, const std::string& mark) {
  std::string broken;
  for (size_t i = 0; i < text.size();) {
    const size_t size = first_character(std::string_view(text).substr(i));
    const bool is_ascii = static_cast<unsigned char>(text[i]) < 0x80;
    broken += is_ascii ? "" : mark;
    broken.append(text, i, size);
    broken += is_ascii ? "" : mark;
    i += size;
  }
  return broken;
}

// Inserts marks into the texts of special tokens; returns whether there were any. Repeats because a special
// token can hide another one that overlaps it, although hardly any vocabulary has such tokens.
bool break_up_specials(const Engine& engine, const std::string& mark, std::string& text) {
  bool has_any = false;
  for (auto specials = specials_in(engine, text); !specials.empty(); specials = specials_in(engine, text)) {
    has_any = true;
    if (mark.empty()) break;
    std::string broken = with_marks(text, specials, mark);
    // No literal match: the token appears only in the text's normalised form, so its source is not ASCII.
    if (broken.size() == text.size()) broken = with_marks_around_others(text, mark);
    text = std::move(broken);
  }
  return has_any;
}

}  // namespace

ChatMessages read_messages(const Engine& engine, Fields& fields, const OutputDialect& dialect) {
  const json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    fields.fail("messages", "must be a non-empty array");
    return {};
  }
  if (std::ssize(*messages) > engine.info().context_length) {
    fields.fail("messages", context_overflow(engine, std::to_string(messages->size()) +
                                                         " messages have at least one token each"));
    return {};
  }
  json copy = *messages;
  for (size_t i = 0; i < copy.size(); ++i)
    normalise_message(copy[i], dialect, fields, "messages[" + std::to_string(i) + "]");
  if (!fields.ok()) return {};
  const std::string mark = free_mark(to_text(copy));
  bool has_marks = false;
  for (json& message : copy)
    if (message["role"] == "user" || message["role"] == "tool")
      has_marks |= break_up_specials(engine, mark, message["content"].get_ref<std::string&>());
  if (has_marks && mark.empty())
    fields.fail("messages", "must not contain special-token texts and all noncharacters U+FDD0 to U+FDEF");
  return {to_text(copy), has_marks ? mark : ""};
}

std::string without_marks(std::string prompt, const std::string& mark) {
  if (mark.empty()) return prompt;
  for (size_t at = prompt.find(mark); at != prompt.npos; at = prompt.find(mark, at))
    prompt.erase(at, mark.size());
  return prompt;
}

std::vector<int32_t> encode_rendered(const Engine& engine, Fields& fields, const std::string& prompt,
                                     const std::string& mark) {
  if (mark.empty()) return encode(engine, fields, "messages", prompt, /*add_special_tokens=*/false);
  if (!check_text_size(engine, fields, "messages", prompt.size() - count_marks(prompt, mark) * mark.size()))
    return {};
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin < prompt.size();) {
    const size_t end = std::min(prompt.find(mark, begin), prompt.size());
    const Result<std::vector<int32_t>> some =
        engine.tokenize(std::string_view(prompt).substr(begin, end - begin), /*add_special_tokens=*/false);
    if (!some.ok()) {
      fail_text(fields, "messages", some.status());
      return {};
    }
    ids.insert(ids.end(), some->begin(), some->end());
    begin = end + mark.size();
  }
  return ids;
}

ChatTemplateOptions read_template_options(Fields& fields) {
  ChatTemplateOptions options;
  options.continue_final_message = fields.boolean("continue_final_message", false);
  options.add_generation_prompt = fields.boolean("add_generation_prompt", !options.continue_final_message);
  json kwargs = json::object();
  if (const json* given = fields.find("chat_template_kwargs")) {
    if (given->is_object()) {
      kwargs = *given;
    } else {
      fields.fail("chat_template_kwargs", std::string("must be an object, not ") + given->type_name());
    }
  }
  const std::string effort = fields.string("reasoning_effort", "");
  if (!effort.empty()) kwargs["reasoning_effort"] = effort;
  if (!kwargs.empty()) options.kwargs_json = to_text(kwargs);
  return options;
}

}  // namespace fp4moe
