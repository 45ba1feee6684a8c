// Which web pages may use this server, and by which names: browsers send requests on behalf of any page.
#pragma once

#include <optional>
#include <string_view>

#include "server/http.h"

namespace fp4moe {

// kInvalidArgument for an element of config.allowed_hosts that is neither "*" nor a host without a port.
Status check_hosts(const ServerConfig& config);

// The refusal (403), or nothing. A page of another origin is refused unless config.cors_allow_origins has it.
// Where only this machine can connect (`is_loopback`) or config.allowed_hosts is set, the Host must be
// "localhost", a loopback address, config.host or one of config.allowed_hosts: a foreign page whose name has
// been bound to a loopback address (DNS rebinding) would pass for this server's own.
std::optional<HttpResponse> refuse_foreign(const ServerConfig& config, bool is_loopback,
                                           const HttpRequest& request);

// "name", "127.0.0.1" or "[::1]" of "name:80", "127.0.0.1" or "[::1]:80".
std::string_view without_port(std::string_view host);

}  // namespace fp4moe
