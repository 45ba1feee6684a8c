// Which web pages may use this server, and under which host names: a browser sends requests on behalf of
// any page.
#pragma once

#include <optional>
#include <string_view>

#include "server/http/http.h"

namespace fp4moe {

// kInvalidArgument for an element of config.allowed_hosts that is neither "*" nor a host without a port.
Status check_hosts(const ServerConfig& config);

// The 403 response, or nothing. Refuses pages from another origin unless config.cors_allow_origins allows it.
// If the listener is on loopback (`is_loopback`) or config.allowed_hosts is set, Host must be "localhost", a
// loopback address, config.host or one of config.allowed_hosts: otherwise a foreign page whose name resolves
// to a loopback address (DNS rebinding) would pass as same-origin.
std::optional<HttpResponse> refuse_foreign(const ServerConfig& config, bool is_loopback,
                                           const HttpRequest& request);

// Removes the port: "name:80" -> "name", "[::1]:80" -> "[::1]"; "127.0.0.1" is unchanged.
std::string_view without_port(std::string_view host);

}  // namespace fp4moe
