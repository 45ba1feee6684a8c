// NodeLinkOptions: flags for connections between prefill nodes and decode nodes.
#pragma once

#include <memory>

#include "engine/disagg/node_address.h"
#include "engine/disagg/node_secret.h"
#include "fp4moe/config.h"

namespace fp4moe {

struct NodeLinkOptions {
  std::shared_ptr<const NodeSecret> secret = std::make_shared<NodeSecret>();  // never null
  AllowedHosts allowed_hosts;                                                 // used by a decode node
  // Prefill node: open connections after their hello. Decode node: prefill nodes remembered.
  int max_connections = 64;
  double timeout_seconds = 10;  // for the whole hello; also KvSocketOptions::timeout_seconds
};

// Reads the secret file. Returns kUnsupported, naming the flag, for a setup that would trust strangers:
// without a secret, a prefill node that listens on a non-loopback address or a decode node that may connect
// to one. Also refuses an invalid secret file, host list, timeout or connection limit.
Result<NodeLinkOptions> node_link_options(const EngineConfig& config);

}  // namespace fp4moe
