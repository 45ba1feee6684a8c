// Where a server is, as the verbs that are clients of one are told.
#pragma once

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

struct ServerUrl {
  std::string host, port;
  std::string prefix;  // of every path: "" or "/..." without a last slash

  std::string text() const { return "http://" + host + ":" + port + prefix; }
};

// "http://host[:port][/prefix]", also with /v1 behind it. kInvalidArgument for other schemes.
Result<ServerUrl> parse_server_url(const std::string& base_url);

}  // namespace fp4moe
