#include "server/api/messages_format.h"

#include <utility>

#include "server/api/apis.h"
#include "server/http/errors.h"

namespace fp4moe {

namespace {

using Kind = OutputPart::Kind;

// Clients return a thinking block only with its signature. This server does not check it.
constexpr const char* kSignature = "unsigned";

json message_usage(const Choice& choice) {
  return {{"input_tokens", choice.prompt_tokens - choice.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", choice.cached_tokens},
          {"output_tokens", choice.completion_tokens}};
}

// The kind of parts that continue a block begun by a part of `kind`.
Kind block_kind(Kind kind) { return kind == Kind::kCall ? Kind::kArguments : kind; }

// A call's arguments. If they are not a JSON object, for example because the output was cut off, the text is
// returned under the key that Anthropic's documentation uses for it.
json input_object(const std::string& arguments) {
  if (arguments.empty()) return json::object();
  Result<json> parsed = parse_json(arguments);
  if (parsed.ok() && parsed->is_object()) return std::move(parsed).value();
  return {{"INVALID_JSON", arguments}};
}

const char* text_field(Kind kind) { return kind == Kind::kReasoning ? "thinking" : "text"; }

}  // namespace

std::string MessagesFormat::keep_alive() const { return "event: ping\ndata: {\"type\":\"ping\"}\n\n"; }

HttpResponse MessagesFormat::refusal(const Status& status) const {
  return shaped(ErrorShape::kAnthropic, error_response(status));
}

std::vector<json> MessagesFormat::failure(const Status& status) {
  return {anthropic_error_object(http_status(status.code()), status.message())};
}

bool MessagesFormat::is_returned(const OutputPart& part, int64_t& num_calls) const {
  if (part.kind == Kind::kReasoning) return thinking != ThinkingDisplay::kNone;
  return is_reported(part, parallel_calls, num_calls);
}

json MessagesFormat::new_block(const OutputPart& part) const {
  if (part.kind == Kind::kCall)
    return {{"type", "tool_use"},
            {"id", part.id.empty() ? make_id("toolu_") : part.id},
            {"name", part.text},
            {"input", json::object()}};
  if (part.kind == Kind::kReasoning) return {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}};
  return {{"type", "text"}, {"text", ""}};
}

json MessagesFormat::message(const Choice& choice, json content) const {
  return {{"id", id_},
          {"type", "message"},
          {"role", "assistant"},
          {"model", model_},
          {"content", std::move(content)},
          {"stop_reason", nullptr},
          {"stop_sequence", nullptr},
          {"usage", message_usage(choice)}};
}

json MessagesFormat::stop(const Choice& choice, int64_t num_calls) const {
  const bool is_stop = choice.finish_reason == FinishReason::kStop;
  const bool has_matched = is_stop && !choice.matched_stop.empty();
  const bool is_context_full =
      choice.finish_reason == FinishReason::kLength && choice.completion_tokens < max_tokens;
  const char* reason = has_matched                ? "stop_sequence"
                       : is_stop && num_calls > 0 ? "tool_use"
                       : is_stop                  ? "end_turn"
                       : is_context_full          ? "model_context_window_exceeded"
                                                  : "max_tokens";  // or aborted: also cut off
  return {{"stop_reason", reason}, {"stop_sequence", has_matched ? json(choice.matched_stop) : json()}};
}

json MessagesFormat::whole(const std::vector<Choice>& choices) {
  const Choice& choice = choices.front();
  const std::unique_ptr<OutputParser> parser = make_parser(plan);
  OutputParts parts;
  parser->push(choice.text, parts);
  parser->finish(parts);
  json content = json::array();
  std::optional<Kind> open;
  std::string arguments;
  int64_t num_calls = 0;
  const auto end_call = [&] {
    if (open == Kind::kArguments) content.back()["input"] = input_object(std::exchange(arguments, {}));
  };
  for (const OutputPart& part : parts) {
    if (!is_returned(part, num_calls)) continue;
    if (open != part.kind) {
      end_call();
      content.push_back(new_block(part));
      if (part.kind == Kind::kReasoning) content.back()["signature"] = kSignature;
    }
    open = block_kind(part.kind);
    if (part.kind == Kind::kArguments)
      arguments += part.text;
    else if (part.kind == Kind::kContent || thinking == ThinkingDisplay::kWhole)
      if (part.kind != Kind::kCall)
        content.back()[text_field(part.kind)].get_ref<std::string&>() += part.text;
  }
  end_call();
  if (content.empty()) content.push_back(new_block({}));  // clients expect a block
  json response = message(choice, std::move(content));
  response.update(stop(choice, num_calls));
  return response;
}

std::vector<json> MessagesFormat::events(const Choice& choice, const Delta& delta) {
  std::vector<json> events;
  if (parser_ == nullptr) {
    parser_ = make_parser(plan);
    events.push_back({{"type", "message_start"}, {"message", message(choice, json::array())}});
  }
  OutputParts parts;
  parser_->push(delta.text, parts);
  const bool is_end = delta.finish_reason != FinishReason::kNone;
  if (is_end) parser_->finish(parts);
  for (const OutputPart& part : parts)
    if (is_returned(part, num_calls_)) add_part(part, events);
  if (is_end && num_blocks_ == 0) begin_block({}, events);
  if (is_end) end_block(events);
  return events;
}

std::vector<json> MessagesFormat::closing(const std::vector<Choice>& choices) {
  const Choice& choice = choices.front();
  return {{{"type", "message_delta"}, {"delta", stop(choice, num_calls_)}, {"usage", message_usage(choice)}},
          {{"type", "message_stop"}}};
}

void MessagesFormat::add_part(const OutputPart& part, std::vector<json>& events) {
  if (open_ != part.kind) begin_block(part, events);
  if (part.kind == Kind::kContent) events.push_back(delta_event("text_delta", "text", part.text));
  if (part.kind == Kind::kReasoning && thinking == ThinkingDisplay::kWhole)
    events.push_back(delta_event("thinking_delta", "thinking", part.text));
  if (part.kind == Kind::kArguments)
    events.push_back(delta_event("input_json_delta", "partial_json", part.text));
}

void MessagesFormat::begin_block(const OutputPart& part, std::vector<json>& events) {
  end_block(events);
  ++num_blocks_;
  open_ = block_kind(part.kind);
  events.push_back(block_event("content_block_start"));
  events.back()["content_block"] = new_block(part);
}

void MessagesFormat::end_block(std::vector<json>& events) {
  if (!open_) return;
  if (open_ == Kind::kReasoning) events.push_back(delta_event("signature_delta", "signature", kSignature));
  events.push_back(block_event("content_block_stop"));
  open_.reset();
}

json MessagesFormat::block_event(const char* type) const {
  return {{"type", type}, {"index", num_blocks_ - 1}};
}

json MessagesFormat::delta_event(const char* type, const char* field, const std::string& text) const {
  json event = block_event("content_block_delta");
  event["delta"] = {{"type", type}, {field, text}};
  return event;
}

}  // namespace fp4moe
