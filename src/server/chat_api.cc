#include "server/openai_format.h"

namespace fp4moe {

namespace {

json token_logprob(const TokenLogprob& t) {
  json bytes = json::array();
  for (const char c : t.bytes) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", t.bytes}, {"logprob", t.logprob}, {"bytes", std::move(bytes)}};
}

json logprobs_object(const std::vector<PositionLogprobs>& positions) {
  json content = json::array();
  for (const PositionLogprobs& position : positions) {
    json entry = token_logprob(position.chosen);
    entry["top_logprobs"] = json::array();
    for (const TokenLogprob& t : position.top) entry["top_logprobs"].push_back(token_logprob(t));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

class ChatFormat final : public OpenAiFormat {
 public:
  bool logprobs = false;

  explicit ChatFormat(const Engine& engine)
      : OpenAiFormat(engine, "chatcmpl-", "chat.completion", "chat.completion.chunk") {}

  std::vector<json> news(const Choice& choice, const Delta& delta) override {
    std::vector<json> events;
    if (!choice.started)
      events.push_back(chunk(choice, {{"role", "assistant"}, {"content", ""}}, nullptr, false));
    if (!delta.text.empty() || !delta.logprobs.empty()) {
      json positions = logprobs ? logprobs_object(delta.logprobs) : json(nullptr);
      events.push_back(chunk(choice, {{"content", delta.text}}, std::move(positions), false));
    }
    if (delta.finish_reason != FinishReason::kNone)
      events.push_back(chunk(choice, json::object(), nullptr, true));
    return events;
  }

 private:
  json whole_choice(const Choice& choice) const override {
    json message = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
    return {{"index", choice.index},
            {"message", std::move(message)},
            {"logprobs", logprobs ? logprobs_object(choice.logprobs) : json(nullptr)},
            {"finish_reason", finish_reason_name(choice.finish_reason)},
            {"matched_stop", matched_stop(choice)}};
  }

  json chunk(const Choice& choice, json delta, json positions, bool finished) const {
    json entry = {{"index", choice.index},
                  {"delta", std::move(delta)},
                  {"logprobs", std::move(positions)},
                  {"finish_reason", nullptr}};
    if (finished) {
      entry["finish_reason"] = finish_reason_name(choice.finish_reason);
      entry["matched_stop"] = matched_stop(choice);
    }
    return event(std::move(entry));
  }
};

// Templates expect content to be one string and tool-call arguments to be objects.
void normalise_message(json& message, Fields& fields, const std::string& name) {
  if (!message.is_object())
    return fields.fail(name, std::string("must be an object, not ") + message.type_name());
  if (!message.contains("role") || !message["role"].is_string())
    return fields.fail(name + ".role", "must be a string");
  json& content = message["content"];  // made null if absent
  if (content.is_null()) content = "";
  if (content.is_array()) {
    std::string text;
    for (size_t j = 0; j < content.size(); ++j) {
      const json& part = content[j];
      const std::string part_name = name + ".content[" + std::to_string(j) + "]";
      if (!part.is_object() || part.value("type", json()) != "text" ||
          !part.value("text", json()).is_string())
        return fields.fail(part_name,
                           "must be {\"type\": \"text\", \"text\": string}: this model reads text only");
      text += (j > 0 ? " " : "") + part["text"].get<std::string>();
    }
    content = std::move(text);
  }
  if (!content.is_string())
    return fields.fail(name + ".content",
                       std::string("must be a string or an array of text parts, not ") + content.type_name());
  if (!message.contains("tool_calls") || !message["tool_calls"].is_array()) return;
  for (json& call : message["tool_calls"]) {
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object()) continue;
    json& function = call["function"];
    if (!function.contains("arguments") || !function["arguments"].is_string()) continue;
    if (auto parsed = parse_json(function["arguments"].get<std::string>()); parsed.ok())
      function["arguments"] = std::move(parsed).value();
  }
}

std::string read_messages(Fields& fields) {
  const json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    fields.fail("messages", "must be a non-empty array");
    return "";
  }
  json copy = *messages;
  for (size_t i = 0; i < copy.size(); ++i)
    normalise_message(copy[i], fields, "messages[" + std::to_string(i) + "]");
  return to_text(copy);
}

ChatTemplateOptions read_template_options(Fields& fields) {
  ChatTemplateOptions options;
  options.continue_final_message = fields.boolean("continue_final_message", false);
  options.add_generation_prompt = fields.boolean("add_generation_prompt", !options.continue_final_message);
  if (const json* tools = fields.find("tools")) {
    if (!tools->is_array()) fields.fail("tools", std::string("must be an array, not ") + tools->type_name());
    if (!tools->empty()) options.tools_json = to_text(*tools);
  }
  const json* choice = fields.find("tool_choice");
  if (choice != nullptr && *choice == "none") options.tools_json.clear();
  if (choice != nullptr && *choice != "none" && *choice != "auto")
    fields.fail("tool_choice", unsupported("must be \"auto\" or \"none\": calls cannot be forced"));
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

void read_response_format(Fields& fields) {
  const json* format = fields.find("response_format");
  if (format == nullptr || (format->is_object() && format->value("type", json()) == "text")) return;
  fields.fail("response_format",
              unsupported("only {\"type\": \"text\"} is supported, got " + to_text(*format).substr(0, 80)));
}

}  // namespace

GenerationCall parse_chat(const Engine& engine, Fields& fields) {
  GenerationCall call;
  auto format = std::make_unique<ChatFormat>(engine);
  const std::string messages = read_messages(fields);
  const ChatTemplateOptions options = read_template_options(fields);
  read_response_format(fields);

  SamplingParams sampling = read_sampling(fields, engine.info().default_sampling);
  const int64_t max_tokens = fields.integer("max_tokens", engine.info().context_length, 0, INT32_MAX);
  sampling.max_new_tokens = fields.integer("max_completion_tokens", max_tokens, 0, INT32_MAX);
  format->logprobs = fields.boolean("logprobs", false);
  const int64_t top = fields.integer("top_logprobs", 0, 0, kMaxTopLogprobs);
  if (top > 0 && !format->logprobs) fields.fail("top_logprobs", "needs logprobs: true");
  if (format->logprobs) sampling.top_logprobs = static_cast<int32_t>(top);
  format->read(call, fields);
  if (!fields.ok()) return call;

  const Result<std::string> prompt = engine.apply_chat_template(messages, options);
  if (!prompt.ok()) {
    fail_text(fields, "messages", prompt.status());
    return call;
  }
  const auto ids = encode(engine, fields, "messages", *prompt, /*add_special_tokens=*/false);
  add_requests(call, fields, format->id, {ids}, format->n(), sampling);
  call.format = std::move(format);
  return call;
}

}  // namespace fp4moe
