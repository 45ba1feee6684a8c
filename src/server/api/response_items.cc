#include "server/api/response_items.h"

#include <algorithm>
#include <utility>

#include "server/api/apis.h"
#include "server/api/response_tools.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxItemIdBytes = 256;

std::string string_or_empty(const json& object, const char* name) {
  const auto at = object.find(name);
  return at != object.end() && at->is_string() ? at->get<std::string>() : "";
}

std::string required_string(Fields& fields, const std::string& name) {
  if (fields.find(name) == nullptr) fields.fail(name, "is missing");
  return fields.string(name, "");
}

// Reads a text, or an array of parts with the types of `allowed`; returns parts of type `type`.
json read_parts(Fields& fields, const std::string& name, const std::set<std::string>& allowed,
                const std::string& type) {
  json parts = json::array();
  const auto add = [&](std::string text) {
    json part = {{"type", type}, {"text", std::move(text)}};
    if (type == "output_text") part.update({{"annotations", json::array()}, {"logprobs", json::array()}});
    parts.push_back(std::move(part));
  };
  const json* content = fields.find(name);
  if (content == nullptr || !(content->is_string() || content->is_array())) {
    fields.fail(name, "must be a string or an array of text parts");
    return parts;
  }
  if (content->is_string()) add(content->get<std::string>());
  for (size_t i = 0; content->is_array() && i < content->size() && fields.ok(); ++i) {
    Fields part((*content)[i], fields.prefix() + name + "[" + std::to_string(i) + "].");
    const std::string given = required_string(part, "type");
    if (part.ok() && !allowed.contains(given))
      part.fail("type",
                unsupported(shown(given) +
                            " is not supported here: this model reads text only, as parts of type " + type));
    std::string text = part.ok() ? required_string(part, given == "refusal" ? "refusal" : "text") : "";
    fields.merge_error(part);
    add(std::move(text));
  }
  return parts;
}

json read_message(Fields& fields) {
  const std::string role = required_string(fields, "role");
  const bool is_assistant = role == "assistant";
  if (fields.ok() && !is_assistant && role != "user" && role != "system" && role != "developer")
    fields.fail("role", "must be \"user\", \"assistant\", \"system\" or \"developer\", got " + shown(role));
  json parts = is_assistant ? read_parts(fields, "content", {"output_text", "text", "refusal"}, "output_text")
                            : read_parts(fields, "content", {"input_text", "text"}, "input_text");
  return {{"type", "message"}, {"role", role}, {"content", std::move(parts)}, {"status", "completed"}};
}

json read_call(Fields& fields) {
  json item = {{"type", "function_call"}};
  for (const char* name : {"call_id", "name", "arguments"}) item[name] = required_string(fields, name);
  if (const std::string space = fields.string("namespace", ""); !space.empty()) item["namespace"] = space;
  item["status"] = "completed";
  return item;
}

json read_call_output(Fields& fields) {
  const std::string call_id = required_string(fields, "call_id");
  const json* output = fields.find("output");
  const bool is_text = output != nullptr && output->is_string();
  json parts = read_parts(fields, "output", {"input_text", "output_text", "text"}, "input_text");
  return {{"type", "function_call_output"},
          {"call_id", call_id},
          {"output", is_text ? parts[0]["text"] : std::move(parts)},
          {"status", "completed"}};
}

// Only the text in "content" can be shown to the model again.
json read_reasoning(Fields& fields) {
  json item = {{"type", "reasoning"}, {"summary", json::array()}};
  if (const json* summary = fields.find("summary"); summary != nullptr && !summary->is_array())
    fields.fail("summary", std::string("must be an array, not ") + summary->type_name());
  item["content"] = fields.find("content") == nullptr
                        ? json::array()
                        : read_parts(fields, "content", {"reasoning_text", "text"}, "reasoning_text");
  item["status"] = "completed";
  return item;
}

json read_reference(const ResponseAccess& access, Fields& fields) {
  const std::string id = required_string(fields, "id");
  if (!fields.ok()) return {};
  const auto text = access.store.find_item(access.owner, id);
  if (text.has_value() && access.hold_json(*text, fields, "id")) return json::parse(*text);
  fields.fail("id", not_found("item " + shown(id) +
                              " is not in a stored response: it was never stored, or deleted, or evicted"));
  return {};
}

std::string type_of(const json& item) {
  if (!item.is_object()) return "";
  if (item.contains("type") && !item["type"].is_null()) return string_or_empty(item, "type");
  return !item.contains("role") && item.contains("id") ? "item_reference" : "message";
}

json read_item(const ResponseAccess& access, Fields& fields, const std::string& type) {
  if (type == "item_reference") return read_reference(access, fields);
  static const struct {
    const char *type, *id_prefix;
    json (*read)(Fields&);
  } kItems[] = {{"message", "msg_", read_message},
                {"function_call", "fc_", read_call},
                {"function_call_output", "fco_", read_call_output},
                {"reasoning", "rs_", read_reasoning}};
  for (const auto& known : kItems) {
    if (type != known.type) continue;
    json item = known.read(fields);
    const std::string id = fields.string("id", "");
    if (id.size() > kMaxItemIdBytes)
      fields.fail("id", "has " + std::to_string(id.size()) + " bytes; the limit is " +
                            std::to_string(kMaxItemIdBytes));
    item["id"] = id.empty() ? make_id(known.id_prefix) : id;
    return item;
  }
  fields.fail("type",
              unsupported(shown(type) + " is not supported here: it must be \"message\", \"function_call\", "
                                        "\"function_call_output\", \"reasoning\" or \"item_reference\""));
  return {};
}

// The texts of parts, as /v1/chat/completions joins them.
std::string joined_text(const json& parts) {
  if (parts.is_string()) return parts.get<std::string>();
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) text += (i > 0 ? " " : "") + string_or_empty(parts[i], "text");
  return text;
}

}  // namespace

Status no_such_response(const std::string& id) {
  return not_found("response " + shown(id) + " was not found: it was never stored, or deleted, or evicted");
}

bool ResponseAccess::hold_bytes(int64_t bytes, Fields& fields, const std::string& name) const {
  if (hold(bytes)) return true;
  fields.fail(name, unavailable("the stored conversation takes " + std::to_string(bytes) +
                                " bytes of memory as parsed JSON, and running requests hold the rest of "
                                "max_buffered_bytes"));
  return false;
}

bool ResponseAccess::hold_json(const std::string& text, Fields& fields, const std::string& name) const {
  const Result<int64_t> bytes = parsed_json_bytes(text);
  if (bytes.ok()) return hold_bytes(*bytes, fields, name);
  fields.fail(name, bytes.status());
  return false;
}

std::vector<json> read_items(const ResponseAccess& access, Fields& fields, int64_t context_length) {
  std::vector<json> items;
  const json* input = fields.find("input");
  if (input != nullptr && input->is_string()) {
    const json message = {{"role", "user"}, {"content", *input}};
    Fields item(message);
    items.push_back(read_item(access, item, "message"));
    return items;
  }
  const bool is_empty = input == nullptr || (input->is_array() && input->empty());
  if (is_empty && fields.find("previous_response_id") != nullptr) return items;
  if (is_empty || !input->is_array()) {
    fields.fail("input", "must be a string or a non-empty array of items");
    return items;
  }
  if (std::ssize(*input) > context_length)
    fields.fail("input", does_not_fit("has " + std::to_string(input->size()) +
                                      " items of at least one token each; the context holds " +
                                      std::to_string(context_length)));
  for (size_t i = 0; i < input->size() && fields.ok(); ++i) {
    Fields item((*input)[i], "input[" + std::to_string(i) + "].");
    if (item.ok()) items.push_back(read_item(access, item, type_of((*input)[i])));
    fields.merge_error(item);
  }
  return items;
}

void ItemMessages::add_system(const std::string& text) {
  if (messages_.size() == 1 && messages_[0]["role"] == "system") {
    messages_[0]["content"].get_ref<std::string&>() += "\n\n" + text;
  } else {
    messages_.push_back({{"role", "system"}, {"content", text}});
  }
}

void ItemMessages::add(const json& item) {
  const std::string type = string_or_empty(item, "type");
  if (type == "reasoning") {
    if (item.contains("content")) reasoning_ += joined_text(item["content"]);
  } else if (type == "function_call") {
    add_call(item);
  } else if (type == "function_call_output") {
    messages_.push_back({{"role", "tool"},
                         {"tool_call_id", string_or_empty(item, "call_id")},
                         {"content", joined_text(item["output"])}});
  } else {
    add_message(item);
  }
}

void ItemMessages::add_message(const json& item) {
  const std::string role = string_or_empty(item, "role");
  std::string text = joined_text(item["content"]);
  const bool is_first = messages_.empty() || (messages_.size() == 1 && messages_[0]["role"] == "system");
  if (role == "assistant") {
    messages_.push_back(assistant(std::move(text)));
  } else if (is_first && role != "user") {
    add_system(text);
  } else {
    messages_.push_back({{"role", role}, {"content", std::move(text)}});
  }
}

void ItemMessages::add_call(const json& item) {
  call_ids_.insert(string_or_empty(item, "call_id"));
  const bool continues = !messages_.empty() && messages_.back()["role"] == "assistant" &&
                         reasoning_.empty() && (messages_.back().contains("tool_calls") || !splits_calls_);
  if (!continues) messages_.push_back(assistant(""));
  const std::string name = string_or_empty(item, "name"), space = string_or_empty(item, "namespace");
  messages_.back()["tool_calls"].push_back({{"id", string_or_empty(item, "call_id")},
                                            {"type", "function"},
                                            {"function",
                                             {{"name", space.empty() ? name : flat_name(space, name)},
                                              {"arguments", string_or_empty(item, "arguments")}}}});
}

// The assistant's next message, with the reasoning before it.
json ItemMessages::assistant(json content) {
  json message = {{"role", "assistant"}, {"content", std::move(content)}};
  if (!reasoning_.empty()) message["reasoning_content"] = std::exchange(reasoning_, {});
  return message;
}

}  // namespace fp4moe
