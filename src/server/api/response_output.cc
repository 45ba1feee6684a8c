#include "server/api/response_output.h"

#include <utility>

#include "server/api/apis.h"
#include "server/api/chat_format.h"

namespace fp4moe {

namespace {

json empty_part(OutputPart::Kind kind) {
  if (kind == OutputPart::Kind::kReasoning) return {{"type", "reasoning_text"}, {"text", ""}};
  return {{"type", "output_text"}, {"text", ""}, {"annotations", json::array()}, {"logprobs", json::array()}};
}

// The item that begins with `part`.
json empty_item(const OutputPart& part) {
  if (part.kind == OutputPart::Kind::kReasoning)
    return {{"id", make_id("rs_")},     {"type", "reasoning"},      {"status", "in_progress"},
            {"summary", json::array()}, {"content", json::array()}, {"encrypted_content", nullptr}};
  if (part.kind == OutputPart::Kind::kContent)
    return {{"id", make_id("msg_")},
            {"type", "message"},
            {"status", "in_progress"},
            {"role", "assistant"},
            {"content", json::array()}};
  return {{"id", make_id("fc_")},    {"type", "function_call"},
          {"status", "in_progress"}, {"call_id", part.id.empty() ? make_id("call_") : part.id},
          {"name", part.text},       {"arguments", ""}};
}

json merged(json first, json second) {
  first.update(second);
  return first;
}

}  // namespace

void EventList::add(const char* type, json fields) {
  if (!is_streamed_) return;
  json event = {{"type", type}, {"sequence_number", next_number_++}};
  event.update(fields);
  events_.push_back(std::move(event));
}

void OutputItems::add(const OutputPart& part) {
  const bool is_call = part.kind == Kind::kCall || part.kind == Kind::kArguments;
  if (part.kind == Kind::kCall || !is_open_ || kind_ != part.kind) {
    end("completed");
    begin(part);
  }
  if (part.kind == Kind::kCall) return;
  json& item = items_.back();
  if (is_call) {
    item["arguments"].get_ref<std::string&>() += part.text;
    return events_.add("response.function_call_arguments.delta", merged(place(), {{"delta", part.text}}));
  }
  json& content = item["content"][0];
  content["text"].get_ref<std::string&>() += part.text;
  json delta = merged(text_place(), {{"delta", part.text}});
  if (kind_ == Kind::kReasoning) return events_.add("response.reasoning_text.delta", std::move(delta));
  json logprobs = take_logprobs(part.text.size());
  for (const json& position : logprobs) content["logprobs"].push_back(position);
  delta["logprobs"] = std::move(logprobs);
  events_.add("response.output_text.delta", std::move(delta));
}

void OutputItems::begin(const OutputPart& part) {
  const bool is_call = part.kind == Kind::kCall;
  is_open_ = true;
  kind_ = is_call ? Kind::kArguments : part.kind;
  items_.push_back(empty_item(part));
  if (const auto at = tools_.namespaced.find(part.text); is_call && at != tools_.namespaced.end())
    items_.back().update({{"name", at->second.name}, {"namespace", at->second.space}});
  events_.add("response.output_item.added", {{"output_index", items_.size() - 1}, {"item", items_.back()}});
  if (is_call) return;
  items_.back()["content"].push_back(empty_part(part.kind));
  events_.add("response.content_part.added", merged(text_place(), {{"part", empty_part(part.kind)}}));
}

void OutputItems::end(const char* status) {
  if (!is_open_) return;
  is_open_ = false;
  json& item = items_.back();
  item["status"] = status;
  if (events_.is_streamed()) {
    if (kind_ == Kind::kArguments) {
      events_.add("response.function_call_arguments.done",
                  merged(place(), {{"name", item["name"]}, {"arguments", item["arguments"]}}));
    } else {
      const json& part = item["content"][0];
      json done = merged(text_place(), {{"text", part["text"]}});
      if (kind_ == Kind::kContent) done["logprobs"] = part["logprobs"];
      events_.add(kind_ == Kind::kContent ? "response.output_text.done" : "response.reasoning_text.done",
                  std::move(done));
      events_.add("response.content_part.done", merged(text_place(), {{"part", part}}));
    }
    events_.add("response.output_item.done", {{"output_index", items_.size() - 1}, {"item", item}});
  }
}

void OutputItems::finish(const char* status) { end(status); }

json OutputItems::place() const {
  return {{"item_id", items_.back()["id"]}, {"output_index", items_.size() - 1}};
}

json OutputItems::text_place() const { return merged(place(), {{"content_index", 0}}); }

void OutputItems::hold_logprobs(const std::vector<PositionLogprobs>& positions) {
  held_logprobs_.insert(held_logprobs_.end(), positions.begin(), positions.end());
}

// The log-probabilities of the tokens of a text that was just parsed: the latest tokens, because the tokens
// of markers and reasoning precede it. Tokens before these are dropped.
json OutputItems::take_logprobs(size_t num_bytes) {
  size_t first = held_logprobs_.size();
  for (size_t covered = 0; first > 0 && covered < num_bytes;)
    covered += held_logprobs_[--first].chosen.bytes.size();
  json logprobs = json::array();
  for (size_t i = first; i < held_logprobs_.size(); ++i)
    logprobs.push_back(position_logprobs(held_logprobs_[i]));
  held_logprobs_.clear();
  return logprobs;
}

}  // namespace fp4moe
