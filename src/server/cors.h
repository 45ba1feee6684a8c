// Cross-origin requests: which web pages' scripts may ask this server.
#pragma once

#include <optional>
#include <string>

#include "server/http.h"

namespace fp4moe {

// kInvalidArgument for what is neither "*" nor an origin such as "https://chat.example.org:8443".
Status check_origins(const ServerConfig& config);

// Header lines for the answer; none where the request comes from no page, or from one that may not ask.
std::string cors_headers(const ServerConfig& config, const HttpRequest& request);

// The answer to a browser's question before a request, if it is one.
std::optional<HttpResponse> answer_preflight(const ServerConfig& config, const HttpRequest& request);

}  // namespace fp4moe
