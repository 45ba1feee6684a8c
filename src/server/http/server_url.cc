#include "server/http/server_url.h"

#include <algorithm>
#include <cctype>

#include "server/http/excerpt.h"

namespace fp4moe {
namespace {

bool is_port(const std::string& text) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return !text.empty() && text.size() <= 5 && std::all_of(text.begin(), text.end(), is_digit) &&
         std::stoi(text) >= 1 && std::stoi(text) <= 65535;
}

// Whether `text` is a host name or an address; `is_v6`: an IPv6 address from inside brackets, with or without
// a zone ("%eth0").
bool is_host(const std::string& text, bool is_v6) {
  const auto is_legal = [is_v6](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '.' || c == '_' || (is_v6 && (c == ':' || c == '%'));
  };
  return !text.empty() && text.size() <= 255 && std::all_of(text.begin(), text.end(), is_legal);
}

bool is_prefix(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return c > ' ' && c < '\x7f' && c != '?' && c != '#' && c != '"' && c != '\\';
  });
}

}  // namespace

Result<ServerUrl> parse_server_url(const std::string& base_url) {
  const std::string scheme = "http://";
  const Status malformed =
      invalid_argument("base-url=" + excerpt(base_url, 200) + " must look like http://host:port");
  if (base_url.rfind(scheme, 0) != 0) return malformed;
  const std::string rest = base_url.substr(scheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string place = rest.substr(0, slash);
  const bool is_v6 = place.rfind('[', 0) == 0;
  const size_t host_end = is_v6 ? place.find(']') : std::min(place.find(':'), place.size());
  if (host_end == std::string::npos) return malformed;
  const std::string behind = place.substr(host_end + (is_v6 ? 1 : 0));  // "" or ":port"
  ServerUrl url{is_v6 ? place.substr(1, host_end - 1) : place.substr(0, host_end),
                behind.empty() ? "80" : behind.substr(1), rest.substr(slash)};
  const bool has_port = behind.empty() || behind[0] == ':';
  if (!has_port || !is_port(url.port) || !is_host(url.host, is_v6) || !is_prefix(url.prefix))
    return malformed;
  while (!url.prefix.empty() && url.prefix.back() == '/') url.prefix.pop_back();
  if (url.prefix == "/v1") url.prefix.clear();  // OpenAI clients configure the URL with /v1
  return url;
}

}  // namespace fp4moe
