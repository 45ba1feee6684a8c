#include "bench/serving_response.h"

#include <nlohmann/json.hpp>

#include "server/http/excerpt.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxShownBytes = 300;  // of an unexpected event or body, shown in the error

Status unexpected(const std::string& what, const std::string& bytes) {
  return data_loss(what + ": " + excerpt(bytes, kMaxShownBytes));
}

// Returns the text of a choice (completion, chat message or chat delta), including reasoning.
std::string text_of(const nlohmann::json& choice) {
  const auto string_at = [](const nlohmann::json& object, const char* name) {
    const auto found = object.find(name);
    return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  for (const char* name : {"delta", "message"}) {
    const auto found = choice.find(name);
    if (found != choice.end() && found->is_object())
      return string_at(*found, "reasoning_content") + string_at(*found, "content");
  }
  return string_at(choice, "text");
}

// Adds the text and usage of a response or event to `response`; returns the text.
std::string take(const nlohmann::json& reply, ServingResponse& response) {
  const auto usage = reply.find("usage");
  if (usage != reply.end() && usage->is_object()) {
    response.prompt_tokens = usage->at("prompt_tokens").get<int64_t>();
    response.output_tokens = usage->at("completion_tokens").get<int64_t>();
    response.has_usage = true;
  }
  const nlohmann::json& choices = reply.at("choices");
  std::string text = choices.empty() ? "" : text_of(choices.at(0));
  response.text += text;
  return text;
}

}  // namespace

void ResponseReader::read(std::string_view bytes, double seconds) {
  for (const std::string& data : events_.read(bytes)) {
    if (!is_over()) on_event(data, seconds);
  }
}

void ResponseReader::on_event(const std::string& data, double seconds) {
  is_done_ = data == "[DONE]";
  if (is_done_) return;
  const nlohmann::json event = nlohmann::json::parse(data, nullptr, false);
  if (!event.is_object()) {
    response_.error = unexpected("an event is not a JSON object", data);
    return;
  }
  if (event.contains("error")) {
    response_.error = internal_error("the stream ended with an error: " + excerpt(data, kMaxShownBytes));
    return;
  }
  try {
    if (take(event, response_).empty()) return;
  } catch (const nlohmann::json::exception& error) {
    response_.error = unexpected(std::string("unexpected event (") + error.what() + ")", data);
    return;
  }
  if (!response_.has_usage) ++response_.output_tokens;
  if (response_.first_text_s < 0) {
    response_.first_text_s = seconds;
  } else {
    response_.gaps_s.push_back(seconds - latest_text_s_);
  }
  latest_text_s_ = seconds;
}

ServingResponse ResponseReader::finish(const Status& closed, double seconds) {
  response_.latency_s = seconds;
  if (response_.error.ok() && !is_done_) {
    response_.error = closed.ok() ? data_loss("the stream ended without [DONE]") : closed;
    response_.error = response_.error.with_context("after " + std::to_string(response_.output_tokens) +
                                                   (response_.has_usage ? " tokens" : " pieces of text"));
  }
  return std::move(response_);
}

ServingResponse read_whole_response(const std::string& body, double seconds) {
  ServingResponse response;
  response.latency_s = seconds;
  const nlohmann::json reply = nlohmann::json::parse(body, nullptr, false);
  if (!reply.is_object()) {
    response.error = unexpected("the response is not a JSON object", body);
    return response;
  }
  try {
    take(reply, response);
    if (!response.has_usage)
      response.error = unexpected(
          "the response has no usage; without usage, only the text of a stream can be counted", body);
  } catch (const nlohmann::json::exception& error) {
    response.error = unexpected(std::string("unexpected response (") + error.what() + ")", body);
  }
  return response;
}

}  // namespace fp4moe
