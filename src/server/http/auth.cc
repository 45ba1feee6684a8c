#include "server/http/auth.h"

#include <algorithm>
#include <boost/beast/core/string.hpp>

#include "server/http/errors.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxKeyBytes = 4096;

// The run time does not depend on where the strings differ.
bool equal_in_constant_time(const std::string& a, const std::string& b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i)
    difference |=
        static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[b.empty() ? 0 : i % b.size()]);
  return difference == 0;
}

// The key's index, or -1. Compares all keys even after a match, to keep the run time constant.
int64_t index_of(const std::vector<std::string>& keys, const std::string& sent) {
  int64_t found = -1;
  for (size_t i = 0; i < keys.size(); ++i)
    if (equal_in_constant_time(sent, keys[i]) && !sent.empty()) found = static_cast<int64_t>(i);
  return found;
}

int64_t sent_key(const std::vector<std::string>& keys, const HttpRequest& request) {
  static constexpr boost::beast::string_view kScheme = "bearer ";
  const std::string& header = request.authorization;
  const bool is_bearer =
      header.size() >= kScheme.size() &&
      boost::beast::iequals(boost::beast::string_view(header.data(), kScheme.size()), kScheme);
  const int64_t bearer = index_of(keys, is_bearer ? header.substr(kScheme.size()) : "");
  return std::max(bearer, index_of(keys, request.api_key));
}

}  // namespace

Status check_keys(const ServerConfig& config) {
  for (const auto* keys : {&config.api_keys, &config.admin_api_keys}) {
    for (const std::string& key : *keys) {
      const bool legal = std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < '\x7f'; });
      if (!legal || key.empty() || key.size() > kMaxKeyBytes)
        return invalid_argument(std::string(keys == &config.api_keys ? "an API key" : "an admin API key") +
                                " of " + std::to_string(key.size()) +
                                " bytes is invalid; a key must have 1 to " + std::to_string(kMaxKeyBytes) +
                                " printable ASCII characters without spaces");
    }
  }
  return {};
}

std::optional<HttpResponse> refuse_access(const ServerConfig& config, Access access,
                                          const HttpRequest& request) {
  const bool admin = access == Access::kAdmin && !config.admin_api_keys.empty();
  const std::vector<std::string>& keys = admin ? config.admin_api_keys : config.api_keys;
  if (access == Access::kOpen || keys.empty() || sent_key(keys, request) >= 0) return std::nullopt;
  HttpResponse response = http_error(401,
                                     std::string(admin ? "a valid admin key" : "a valid key") +
                                         " is required: send Authorization: Bearer KEY, or x-api-key: KEY",
                                     "invalid_api_key");
  response.extra_headers = "WWW-Authenticate: Bearer\r\n";
  return response;
}

std::string client_key(const ServerConfig& config, const HttpRequest& request) {
  const int64_t key = sent_key(config.api_keys, request);
  return key >= 0 ? "key " + std::to_string(key) : "";
}

std::string client_of(const ServerConfig& config, const HttpExchange& exchange) {
  const std::string key = client_key(config, exchange.request());
  return key.empty() ? "address " + exchange.peer() : key;
}

}  // namespace fp4moe
