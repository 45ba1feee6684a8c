// OpenAI error objects, and the one table from Status to HTTP.
#pragma once

#include <string>

#include "fp4moe/status.h"
#include "server/http/http.h"
#include "server/json.h"

namespace fp4moe {

// The API whose error objects a route's responses have.
enum class ErrorShape { kOpenAi, kAnthropic };

int http_status(StatusCode code);

// {"error":{"message","type","param","code"}}; an empty `param` becomes null.
std::string error_body(const Status& status, const std::string& param);
// The response to an error that has no Status, such as a missing key.
HttpResponse http_error(int status, const std::string& message, const std::string& code);
// The whole response, with Retry-After for errors that are transient.
HttpResponse error_response(const Status& status, const std::string& param = "");

// Anthropic's error object: {"type":"error","error":{"type","message"}}, with its type for an HTTP status.
json anthropic_error_object(int http_status, const std::string& message);
// An OpenAI error response in another shape; other responses are returned unchanged.
HttpResponse shaped(ErrorShape shape, HttpResponse response);
// The server-sent events, as text, that end a stream with an error.
std::string last_events(ErrorShape shape, const Status& status);

}  // namespace fp4moe
