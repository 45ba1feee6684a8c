#include "server/http/errors.h"

#include <utility>

namespace fp4moe {

namespace {

struct Row {
  StatusCode code;
  int http;
  const char* type;
  const char* openai_code;  // nullptr: null
};

constexpr Row kRows[] = {
    {StatusCode::kInvalidArgument, 400, "invalid_request_error", nullptr},
    {StatusCode::kNotFound, 404, "not_found_error", "not_found"},
    {StatusCode::kDataLoss, 500, "server_error", "data_loss"},
    {StatusCode::kUnsupported, 400, "invalid_request_error", "unsupported"},
    {StatusCode::kDoesNotFit, 400, "invalid_request_error", "context_length_exceeded"},
    {StatusCode::kCancelled, 499, "cancelled", "cancelled"},
    {StatusCode::kUnavailable, 503, "service_unavailable", "unavailable"},
    {StatusCode::kDeadline, 504, "timeout", "timeout"},
    {StatusCode::kInternal, 500, "server_error", "internal_error"},
};

const Row& row(StatusCode code) {
  for (const Row& r : kRows) {
    if (r.code == code) return r;
  }
  return kRows[std::size(kRows) - 1];
}

}  // namespace

int http_status(StatusCode code) { return row(code).http; }

std::string error_body(const Status& status, const std::string& param) {
  const Row& r = row(status.code());
  std::string message = status.message();
  // LangChain and Claude Code recognize the error by these words.
  if (status.code() == StatusCode::kDoesNotFit) message.insert(0, "prompt is too long: ");
  json error = {{"message", std::move(message)}, {"type", r.type}, {"param", nullptr}, {"code", nullptr}};
  if (!param.empty()) error["param"] = param;
  if (r.openai_code != nullptr) error["code"] = r.openai_code;
  return to_text({{"error", std::move(error)}});
}

HttpResponse http_error(int status, const std::string& message, const std::string& code) {
  HttpResponse response;
  response.status = status;
  response.body = to_text(
      {{"error",
        {{"message", message}, {"type", "invalid_request_error"}, {"param", nullptr}, {"code", code}}}});
  return response;
}

json anthropic_error_object(int http_status, const std::string& message) {
  const char* type = http_status == 401   ? "authentication_error"
                     : http_status == 403 ? "permission_error"
                     : http_status == 404 ? "not_found_error"
                     : http_status == 413 ? "request_too_large"
                     : http_status == 429 ? "rate_limit_error"
                     : http_status == 503 ? "overloaded_error"
                     : http_status == 504 ? "timeout_error"
                     : http_status < 500  ? "invalid_request_error"
                                          : "api_error";
  return {{"type", "error"}, {"error", {{"type", type}, {"message", message}}}};
}

HttpResponse shaped(ErrorShape shape, HttpResponse response) {
  if (shape == ErrorShape::kOpenAi || response.status < 400) return response;
  const Result<json> body = parse_json(response.body);
  if (!body.ok() || !body->contains("error")) return response;
  const json& error = (*body)["error"];
  response.body = to_text(anthropic_error_object(response.status, error.value("message", std::string())));
  return response;
}

std::string last_events(ErrorShape shape, const Status& status) {
  if (shape == ErrorShape::kOpenAi) return "data: " + error_body(status, "") + "\n\ndata: [DONE]\n\n";
  const json error = anthropic_error_object(http_status(status.code()), status.message());
  return "event: error\ndata: " + to_text(error) + "\n\n";
}

HttpResponse error_response(const Status& status, const std::string& param) {
  HttpResponse response;
  response.status = http_status(status.code());
  response.body = error_body(status, param);
  if (status.code() == StatusCode::kUnavailable) response.extra_headers = "Retry-After: 1\r\n";
  return response;
}

}  // namespace fp4moe
