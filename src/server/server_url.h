// Where a server is, as the verbs that are clients of one are told.
#pragma once

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

struct ServerUrl {
  std::string host, port;  // a name or an address (of IPv6 without brackets), 1..65535
  std::string prefix;      // of every path: "" or "/..." without a last slash

  std::string authority() const {  // "host:port"
    return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
  }
  std::string text() const { return "http://" + authority() + prefix; }
};

// "http://host[:port][/prefix]", also with /v1 behind it. kInvalidArgument for other schemes, hosts and ports
// that cannot be, user names, queries, spaces and control characters.
Result<ServerUrl> parse_server_url(const std::string& base_url);

}  // namespace fp4moe
