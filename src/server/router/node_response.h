// Parses a node's /server_info response for a router. The peer may be any process that listens on the port.
#pragma once

#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// A node's description of itself in the response to GET /server_info.
struct NodeInfo {
  std::string mode;        // its --disaggregation-mode; "null": not disaggregated
  int bootstrap_port = 0;  // 0: none
};

// kDataLoss if the body is not a JSON object or a field has an invalid value; the message has the field, its
// value (escaped and cut) and the allowed values.
Result<NodeInfo> read_node_info(std::string_view body);

// Checks that the node can have this role. `knows_port`: the router's configuration has the node's bootstrap
// port. Returns kUnsupported and the reason if it cannot.
Status check_node_info(const NodeInfo& info, const std::string& role, bool knows_port);

}  // namespace fp4moe
