#include "server/api/chat_format.h"

#include <utility>

#include "server/chat/reasoning_tokens.h"

namespace fp4moe {

namespace {

using Kind = OutputPart::Kind;

json new_call(const OutputPart& call) {
  return {{"id", call.id.empty() ? make_id("call_") : call.id},
          {"type", "function"},
          {"function", {{"name", call.text}, {"arguments", ""}}}};
}

json token_logprob(const TokenLogprob& t, bool by_id) {
  json bytes = json::array();
  for (const char c : t.bytes) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token_name(t, by_id)}, {"logprob", t.logprob}, {"bytes", std::move(bytes)}};
}

}  // namespace

json position_logprobs(const PositionLogprobs& position, bool by_id) {
  json entry = token_logprob(position.chosen, by_id);
  entry["top_logprobs"] = json::array();
  for (const TokenLogprob& t : position.top) entry["top_logprobs"].push_back(token_logprob(t, by_id));
  return entry;
}

json ChatFormat::logprobs_object(const std::vector<PositionLogprobs>& positions) const {
  json content = json::array();
  for (const PositionLogprobs& position : positions)
    content.push_back(position_logprobs(position, names_tokens_by_id()));
  return {{"content", std::move(content)}};
}

bool ChatFormat::is_returned(const OutputPart& part, int64_t& num_calls) const {
  const bool is_hidden = part.kind == Kind::kReasoning && !includes_reasoning;
  return is_reported(part, parallel_calls, num_calls) && !is_hidden;
}

std::vector<json> ChatFormat::events(const Choice& choice, const Delta& delta) {
  if (streams_.size() <= static_cast<size_t>(choice.index))
    streams_.resize(static_cast<size_t>(choice.index) + 1);
  Stream& stream = streams_[static_cast<size_t>(choice.index)];
  if (stream.parser == nullptr) stream.parser = make_parser(plan);
  OutputParts parts;
  stream.parser->push(delta.text, parts);
  const bool is_end = delta.finish_reason != FinishReason::kNone;
  if (is_end) stream.parser->finish(parts);

  std::vector<json> events;
  if (!choice.started) {
    events.push_back(chunk(choice, {{"role", "assistant"}, {"content", ""}}, nullptr));
    if (returns_token_ids()) events.back()["prompt_token_ids"] = *choice.prompt_ids;
  }
  const size_t num_before = events.size();
  json positions = logprobs && !delta.logprobs.empty() ? logprobs_object(delta.logprobs) : json(nullptr);
  for (const OutputPart& part : parts)
    if (is_returned(part, stream.num_calls))
      events.push_back(chunk(choice, part_delta(part, stream), std::exchange(positions, nullptr)));
  if (!positions.is_null())  // tokens whose text is held back or empty
    events.push_back(chunk(choice, {{"content", ""}}, std::move(positions)));
  if (returns_token_ids() && !delta.token_ids.empty()) {
    if (events.size() == num_before) events.push_back(chunk(choice, {{"content", ""}}, nullptr));
    events.back()["choices"][0]["token_ids"] = delta.token_ids;
  }
  if (is_end) events.push_back(last_chunk(choice, stream.num_calls));
  return events;
}

json ChatFormat::part_delta(const OutputPart& part, Stream& stream) const {
  if (part.kind == Kind::kReasoning && plan.separates_reasoning)
    return {{"reasoning_content", part.text}, {"reasoning", part.text}};
  if (part.kind == Kind::kReasoning || part.kind == Kind::kContent) return {{"content", part.text}};
  json call = part.kind == Kind::kCall ? new_call(part) : json{{"function", {{"arguments", part.text}}}};
  if (legacy_calls) return {{"function_call", std::move(call["function"])}};
  json entry = {{"index", stream.num_calls - 1}};
  entry.update(call);
  return {{"tool_calls", json::array({std::move(entry)})}};
}

json ChatFormat::whole_choice(const Choice& choice) const {
  const std::unique_ptr<OutputParser> parser = make_parser(plan);
  OutputParts parts;
  parser->push(choice.text, parts);
  parser->finish(parts);
  std::string content, reasoning;
  json calls = json::array();
  int64_t num_calls = 0;
  for (const OutputPart& part : parts) {
    if (!is_returned(part, num_calls)) continue;
    if (part.kind == Kind::kReasoning && plan.separates_reasoning)
      reasoning += part.text;
    else if (part.kind == Kind::kContent || part.kind == Kind::kReasoning)
      content += part.text;
    if (part.kind == Kind::kCall) calls.push_back(new_call(part));
    if (part.kind == Kind::kArguments)
      calls.back()["function"]["arguments"].get_ref<std::string&>() += part.text;
  }
  json message = {{"role", "assistant"}, {"content", content}, {"refusal", nullptr}};
  if (content.empty() && !calls.empty()) message["content"] = nullptr;
  const json reason = reasoning.empty() ? json(nullptr) : json(reasoning);
  message["reasoning_content"] = reason;  // SGLang's name
  message["reasoning"] = reason;          // vLLM's
  if (!calls.empty() && legacy_calls) {
    message["function_call"] = std::move(calls[0]["function"]);
  } else if (!calls.empty()) {
    message["tool_calls"] = std::move(calls);
  }
  json entry = {{"index", choice.index},
                {"message", std::move(message)},
                {"logprobs", logprobs ? logprobs_object(choice.logprobs) : json(nullptr)},
                {"finish_reason", finish_reason(choice, num_calls)},
                {"matched_stop", matched_stop(choice)}};
  if (returns_token_ids()) entry["token_ids"] = choice.token_ids;
  return entry;
}

int64_t ChatFormat::reasoning_tokens(const Choice& choice) const {
  return count_reasoning_tokens(engine_, plan, choice.token_ids, choice.matched_stop_token);
}

void ChatFormat::add_to_whole(json& response, const std::vector<Choice>& choices) const {
  if (returns_token_ids()) response["prompt_token_ids"] = *choices.front().prompt_ids;
}

std::string ChatFormat::finish_reason(const Choice& choice, int64_t num_calls) const {
  if (choice.finish_reason == FinishReason::kStop && num_calls > 0)
    return legacy_calls ? "function_call" : "tool_calls";
  return finish_reason_name(choice.finish_reason);
}

json ChatFormat::chunk(const Choice& choice, json delta, json positions) const {
  delta.emplace("reasoning_content", nullptr);  // SGLang's clients read it from every event
  return event(choice, {{"index", choice.index},
                        {"delta", std::move(delta)},
                        {"logprobs", std::move(positions)},
                        {"finish_reason", nullptr}});
}

json ChatFormat::last_chunk(const Choice& choice, int64_t num_calls) const {
  return event(choice, {{"index", choice.index},
                        {"delta", {{"reasoning_content", nullptr}}},
                        {"logprobs", nullptr},
                        {"finish_reason", finish_reason(choice, num_calls)},
                        {"matched_stop", matched_stop(choice)}});
}

}  // namespace fp4moe
