#include "server/server_url.h"

#include <algorithm>

namespace fp4moe {

Result<ServerUrl> parse_server_url(const std::string& base_url) {
  const std::string scheme = "http://";
  if (base_url.rfind(scheme, 0) != 0)
    return invalid_argument("base-url=" + base_url + " must look like http://host:port");
  const std::string rest = base_url.substr(scheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string place = rest.substr(0, slash);
  const size_t colon = place.rfind(':');
  ServerUrl url{place.substr(0, colon), colon == std::string::npos ? "80" : place.substr(colon + 1),
                rest.substr(slash)};
  while (!url.prefix.empty() && url.prefix.back() == '/') url.prefix.pop_back();
  if (url.prefix == "/v1") url.prefix.clear();  // OpenAI clients are given the URL with it
  return url;
}

}  // namespace fp4moe
