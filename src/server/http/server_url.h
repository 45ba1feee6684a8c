// The URL of a server, as given to the client subcommands.
#pragma once

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// The host as in a URL: an IPv6 address gets brackets unless it has them.
inline std::string url_host(const std::string& host) {
  return host.find(':') == std::string::npos || host[0] == '[' ? host : "[" + host + "]";
}

struct ServerUrl {
  std::string host, port;  // a name or an address (IPv6 without brackets); port 1..65535
  std::string prefix;      // prepended to every path: "" or "/..." without a trailing slash

  std::string authority() const {  // "host:port"
    return url_host(host) + ":" + port;
  }
  std::string text() const { return "http://" + authority() + prefix; }
};

// "http://host[:port][/prefix]"; a trailing /v1 is dropped. kInvalidArgument for other schemes, invalid hosts
// and ports, user names, queries, spaces and control characters.
Result<ServerUrl> parse_server_url(const std::string& base_url);

}  // namespace fp4moe
