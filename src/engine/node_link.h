// NodeLinkOptions: what the flags say about connections between prefill nodes and decode nodes.
#pragma once

#include <memory>

#include "engine/node_address.h"
#include "engine/node_secret.h"
#include "fp4moe/config.h"

namespace fp4moe {

struct NodeLinkOptions {
  std::shared_ptr<const NodeSecret> secret = std::make_shared<NodeSecret>();  // never null
  AllowedHosts allowed_hosts;                                                 // a decode node's
  // A prefill node: connections after their hello. A decode node: prefill nodes that it remembers.
  int max_connections = 64;
  double timeout_seconds = 10;  // of a hello, and KvSocketOptions::timeout_seconds
};

// Reads the secret file. Refuses what would let strangers in, naming the flag: a prefill node that listens on
// another than a loopback address, or a decode node that may connect to one, without a secret (kUnsupported);
// a secret file or host list that is invalid.
Result<NodeLinkOptions> node_link_options(const EngineConfig& config);

}  // namespace fp4moe
