// What a router reads of its nodes' answers. Nodes may be anything that listens on their ports.
#pragma once

#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// What the answer to GET /server_info says of a node.
struct NodeInfo {
  std::string mode;        // its --disaggregation-mode; "null": none
  int bootstrap_port = 0;  // 0: none
};

// kDataLoss, with the field, its value (escaped and cut) and what is legal: no JSON object, or fields of
// other types.
Result<NodeInfo> read_node_info(std::string_view body);

// Whether it can be a node of this role, whose bootstrap port the router knows or not. kUnsupported, with the
// reason.
Status check_node_info(const NodeInfo& info, const std::string& role, bool knows_port);

}  // namespace fp4moe
