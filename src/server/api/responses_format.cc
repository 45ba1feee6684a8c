#include "server/api/responses_format.h"

#include <utility>

namespace fp4moe {

namespace {

using Kind = OutputPart::Kind;

const char* status_of(FinishReason reason) {
  return reason == FinishReason::kLength  ? "incomplete"
         : reason == FinishReason::kAbort ? "cancelled"
                                          : "completed";
}

json response_usage(const Choice& choice, int64_t reasoning_tokens) {
  return {{"input_tokens", choice.prompt_tokens},
          {"input_tokens_details", {{"cached_tokens", choice.cached_tokens}, {"cache_write_tokens", 0}}},
          {"output_tokens", choice.completion_tokens},
          {"output_tokens_details", {{"reasoning_tokens", reasoning_tokens}}},
          {"total_tokens", choice.prompt_tokens + choice.completion_tokens}};
}

std::vector<StoredItem> stored(const json& items, int64_t& parsed_bytes) {
  std::vector<StoredItem> list;
  for (const json& item : items) {
    list.push_back({item["id"].get_ref<const std::string&>(), to_text(item)});
    const Result<int64_t> bytes = parsed_json_bytes(list.back().text);
    parsed_bytes += bytes.ok() ? *bytes : 0;
  }
  return list;
}

}  // namespace

ResponsesFormat::ResponsesFormat(const Engine& engine, const ResponseAccess& access, ResponsesRequest request,
                                 const Setup& setup)
    : store_(access.store),
      owner_(access.owner),
      request_(std::move(request)),
      setup_(setup),
      parser_(make_parser(setup.plan)),
      reasoning_tokens_(engine, setup.plan),
      events_(request_.stream) {}

void ResponsesFormat::begin() {
  if (events_.has_begun()) return;
  events_.add("response.created", {{"response", response("in_progress")}});
  events_.add("response.in_progress", {{"response", response("in_progress")}});
}

void ResponsesFormat::parse(const Choice& choice, const Delta& delta) {
  if (setup_.logprobs) output_.hold_logprobs(delta.logprobs);
  reasoning_tokens_.push(delta.token_ids, delta.matched_stop_token);
  OutputParts parts;
  parser_->push(delta.text, parts);
  const bool is_end = choice.finish_reason != FinishReason::kNone;
  if (is_end) parser_->finish(parts);
  for (OutputPart& part : parts) {
    if (!setup_.plan.separates_reasoning && part.kind == Kind::kReasoning) part.kind = Kind::kContent;
    if (is_reported(part, setup_.parallel_calls, num_calls_)) output_.add(part);
  }
  if (is_end) output_.finish(choice.finish_reason == FinishReason::kStop ? "completed" : "incomplete");
}

std::vector<json> ResponsesFormat::events(const Choice& choice, const Delta& delta) {
  begin();
  parse(choice, delta);
  return events_.take();
}

std::vector<json> ResponsesFormat::closing(const std::vector<Choice>& choices) {
  const bool is_complete = choices.front().finish_reason == FinishReason::kStop;
  events_.add(is_complete ? "response.completed" : "response.incomplete",
              {{"response", finished(choices.front())}});
  return events_.take();
}

json ResponsesFormat::whole(const std::vector<Choice>& choices) { return finished(choices.front()); }

std::vector<json> ResponsesFormat::failure(const Status& status) {
  begin();
  json failed = response("failed");
  const bool is_request = status.code() == StatusCode::kInvalidArgument;
  failed["error"] = {{"code", is_request ? "invalid_prompt" : "server_error"}, {"message", status.message()}};
  events_.add("response.failed", {{"response", std::move(failed)}});
  return events_.take();
}

json ResponsesFormat::response(const char* status) const {
  json response = request_.head;
  response.update({{"created_at", created_},
                   {"completed_at", nullptr},
                   {"status", status},
                   {"error", nullptr},
                   {"incomplete_details", nullptr},
                   {"output", json::array()},
                   {"usage", nullptr}});
  return response;
}

json ResponsesFormat::finished(const Choice& choice) {
  json response = this->response(status_of(choice.finish_reason));
  response["completed_at"] = static_cast<int64_t>(std::time(nullptr));
  if (choice.finish_reason == FinishReason::kLength)
    response["incomplete_details"] = {{"reason", "max_output_tokens"}};
  response["usage"] = response_usage(choice, reasoning_tokens_.finish());
  response["output"] = output_.items();
  if (request_.is_stored) response["store"] = store(response);
  return response;
}

bool ResponsesFormat::store(const json& response) const {
  json head = response;
  head.erase("output");
  int64_t parsed_bytes = 0;
  std::vector<StoredItem> input = stored(request_.input, parsed_bytes);
  std::vector<StoredItem> output = stored(response["output"], parsed_bytes);
  return store_.put(
      {head["id"].get<std::string>(), owner_, to_text(head),
       std::make_shared<const Turn>(request_.previous, std::move(input), std::move(output), parsed_bytes)});
}

}  // namespace fp4moe
