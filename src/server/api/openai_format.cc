#include "server/api/openai_format.h"

#include <span>

namespace fp4moe {

namespace {

// OpenAI's usage object; a prompt is counted once for its n choices.
json usage(std::span<const Choice> choices, int64_t n) {
  int64_t prompt = 0, cached = 0, completion = 0;
  for (const Choice& choice : choices) {
    if (choice.index % n == 0) prompt += choice.prompt_tokens;
    if (choice.index % n == 0) cached += choice.cached_tokens;
    completion += choice.completion_tokens;
  }
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

}  // namespace

std::string token_text(const std::string& bytes) {
  try {
    json(bytes).dump();  // throws on invalid UTF-8
    return bytes;
  } catch (const json::exception&) {
    static constexpr char kHex[] = "0123456789abcdef";
    std::string text = "bytes:";
    for (const char c : bytes) {
      const auto byte = static_cast<unsigned char>(c);
      text += "\\x";
      text += kHex[byte >> 4];
      text += kHex[byte & 15];
    }
    return text;
  }
}

void OpenAiFormat::read(GenerationCall& call, Fields& fields, Request& request) {
  read_identity(fields, id_prefix_, request);
  id_ = request.id;
  n_ = read_n(fields);
  read_routed_experts(fields, request);
  returns_token_ids_ = fields.boolean("return_token_ids", false);
  names_tokens_by_id_ = fields.boolean("return_tokens_as_token_ids", false);
  call.stream = fields.boolean("stream", false);
  const json* options = fields.find("stream_options");
  if (options == nullptr) return;
  Fields inner(*options, "stream_options.");
  include_usage_ = inner.boolean("include_usage", false);
  continuous_usage_ = inner.boolean("continuous_usage_stats", false) && include_usage_;
  fields.merge(inner);
}

json OpenAiFormat::head(const char* object, json choices) const {
  return {{"id", id_},
          {"object", object},
          {"created", created_},
          {"model", model_},
          {"system_fingerprint", fingerprint_},
          {"choices", std::move(choices)}};
}

json OpenAiFormat::final_usage(const std::vector<Choice>& choices) const {
  json total = usage(choices, n_);
  int64_t reasoning = 0;
  for (const Choice& choice : choices) reasoning += reasoning_tokens(choice);
  if (reasoning >= 0) total["completion_tokens_details"] = {{"reasoning_tokens", reasoning}};
  return total;
}

json OpenAiFormat::event(const Choice& choice, json entry) const {
  json event = head(event_object_, json::array({std::move(entry)}));
  if (include_usage_) event["usage"] = continuous_usage_ ? usage({&choice, 1}, 1) : json(nullptr);
  return event;
}

std::string token_name(const TokenLogprob& token, bool by_id) {
  return by_id ? "token_id:" + std::to_string(token.token_id) : token.bytes;
}

std::vector<json> OpenAiFormat::closing(const std::vector<Choice>& choices) {
  std::vector<json> events;
  if (choices.front().routed_experts != nullptr) {
    events.push_back(head(event_object_, json::array()));
    if (include_usage_) events.back()["usage"] = nullptr;
    add_experts(events.back(), choices);
  }
  if (include_usage_) {
    events.push_back(head(event_object_, json::array()));
    events.back()["usage"] = final_usage(choices);
  }
  return events;
}

void OpenAiFormat::add_experts(json& response, const std::vector<Choice>& choices) {
  if (choices.front().routed_experts != nullptr)
    response["sglext"] = {{"routed_experts", routed_experts_text(choices.front())}};
}

void OpenAiFormat::check_experts(Fields& fields, const GenerationCall& call) {
  if (call.requests.size() > 1 && call.requests.front().routed_experts_from >= 0)
    fields.fail("return_routed_experts",
                unsupported("supports one output per request, got " + std::to_string(call.requests.size()) +
                            "; /generate supports several"));
}

json OpenAiFormat::whole(const std::vector<Choice>& choices) {
  json list = json::array();
  for (const Choice& choice : choices) list.push_back(whole_choice(choice));
  json response = head(object_, std::move(list));
  response["usage"] = final_usage(choices);
  add_experts(response, choices);
  add_to_whole(response, choices);
  return response;
}

}  // namespace fp4moe
