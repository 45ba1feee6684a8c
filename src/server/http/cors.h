// Cross-origin requests: the web pages whose scripts may call this server.
#pragma once

#include <optional>
#include <string>

#include "server/http/http.h"

namespace fp4moe {

// kInvalidArgument for an element that is neither "*" nor an origin such as "https://chat.example.org:8443".
Status check_origins(const ServerConfig& config);

// Header lines for the response; none if the request does not come from an allowed page.
std::string cors_headers(const ServerConfig& config, const HttpRequest& request);

// The response to a CORS preflight request; nothing for any other request.
std::optional<HttpResponse> respond_to_preflight(const ServerConfig& config, const HttpRequest& request);

}  // namespace fp4moe
