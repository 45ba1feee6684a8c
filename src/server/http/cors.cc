#include "server/http/cors.h"

#include <algorithm>

namespace fp4moe {

namespace {

const std::string kAny = "*";

bool has(const std::vector<std::string>& list, const std::string& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

Status check_origins(const ServerConfig& config) {
  for (const std::string& origin : config.cors_allow_origins) {
    const size_t scheme = origin.find("://");
    const bool is_origin = scheme != std::string::npos && scheme > 0 && scheme + 3 < origin.size() &&
                           origin.find_first_of("/ ,*\r\n", scheme + 3) == std::string::npos &&
                           origin.find(' ') > scheme;
    if (origin != kAny && !is_origin)
      return invalid_argument("cors_allow_origins: '" + origin.substr(0, 80) +
                              "' is not an origin; use scheme://host, scheme://host:port or *");
  }
  return {};
}

std::string cors_headers(const ServerConfig& config, const HttpRequest& request) {
  const std::vector<std::string>& allowed = config.cors_allow_origins;
  if (allowed.empty()) return "";
  const bool any = has(allowed, kAny);
  const std::string vary = any ? "" : "Vary: Origin\r\n";  // caches must not share responses between origins
  if (request.origin.empty() || (!any && !has(allowed, request.origin))) return vary;
  return "Access-Control-Allow-Origin: " + (any ? kAny : request.origin) +
         "\r\nAccess-Control-Expose-Headers: Retry-After, X-Request-Id\r\n" + vary;
}

std::optional<HttpResponse> respond_to_preflight(const ServerConfig& config, const HttpRequest& request) {
  if (config.cors_allow_origins.empty() || request.method != "OPTIONS" || request.origin.empty())
    return std::nullopt;
  HttpResponse response;
  response.content_type = "text/plain";
  const std::string& asked = request.access_control_request_headers;
  response.extra_headers =
      "Access-Control-Allow-Methods: GET, HEAD, POST, DELETE\r\nAccess-Control-Allow-Headers: " +
      (asked.empty() ? "Authorization, Content-Type" : asked) + "\r\nAccess-Control-Max-Age: 600\r\n";
  return response;
}

}  // namespace fp4moe
