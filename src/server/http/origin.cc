#include "server/http/origin.h"

#include <arpa/inet.h>

#include <algorithm>
#include <boost/beast/core/string.hpp>
#include <string>
#include <vector>

#include "server/http/errors.h"

namespace fp4moe {

namespace {

constexpr const char* kAnyHost = "*";

bool equal(std::string_view a, std::string_view b) {
  return boost::beast::iequals({a.data(), a.size()}, {b.data(), b.size()});
}

bool is_listed(const std::vector<std::string>& list, std::string_view value) {
  return std::any_of(list.begin(), list.end(), [&](const std::string& s) { return equal(s, value); });
}

bool is_loopback_address(std::string_view host) {
  if (equal(host, "localhost") || host == "[::1]") return true;
  in_addr address{};
  return inet_pton(AF_INET, std::string(host).c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

bool is_own_host(const ServerConfig& config, std::string_view host) {
  return is_loopback_address(host) || equal(host, config.host) || equal(host, "[" + config.host + "]") ||
         is_listed(config.allowed_hosts, host) || is_listed(config.allowed_hosts, kAnyHost);
}

// "scheme://host:port" -> "host:port".
std::string_view authority_of(std::string_view origin) {
  const size_t scheme = origin.find("://");
  return scheme == origin.npos ? std::string_view() : origin.substr(scheme + 3);
}

}  // namespace

Status check_hosts(const ServerConfig& config) {
  for (const std::string& host : config.allowed_hosts) {
    const bool is_host =
        !host.empty() && host.find_first_of(" \t,/@?#*") == std::string::npos && without_port(host) == host;
    if (host != kAnyHost && !is_host)
      return invalid_argument("allowed_hosts: '" + host.substr(0, 80) +
                              "' is not a host; use a name or an address without a port, or *");
  }
  return {};
}

std::string_view without_port(std::string_view host) {
  const size_t bracket = host.rfind(']');  // the end of an IPv6 address
  const size_t colon = host.rfind(':');
  return colon != host.npos && (bracket == host.npos || colon > bracket) ? host.substr(0, colon) : host;
}

std::optional<HttpResponse> refuse_foreign(const ServerConfig& config, bool is_loopback,
                                           const HttpRequest& request) {
  const bool checks_host = is_loopback || !config.allowed_hosts.empty();
  // HTTP/1.0 clients may omit Host; browsers always send it.
  if (checks_host && !request.host.empty() && !is_own_host(config, without_port(request.host)))
    return http_error(403,
                      "Host \"" + request.host.substr(0, 80) +
                          "\" is not a name of this server; use localhost, a loopback address or a host in "
                          "--allowed-hosts",
                      "host_not_allowed");
  const std::string& origin = request.origin;
  const std::vector<std::string>& allowed = config.cors_allow_origins;
  const std::string_view authority = authority_of(origin);
  const bool is_own = !authority.empty() && equal(authority, request.host);
  if (origin.empty() || is_own || is_listed(allowed, origin) || is_listed(allowed, kAnyHost))
    return std::nullopt;
  return http_error(403,
                    "pages from \"" + origin.substr(0, 80) +
                        "\" may not use this server; allow them with --cors-allow-origins",
                    "origin_not_allowed");
}

}  // namespace fp4moe
