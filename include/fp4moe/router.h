// Router: one address in front of prefill nodes and decode nodes (docs/disaggregation.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fp4moe/server.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct RouterConfig {
  struct PrefillNode {
    std::string url;         // "http://host:port"
    int bootstrap_port = 0;  // 0: taken from the node's /server_info
  };
  std::vector<PrefillNode> prefill;
  std::vector<std::string> decode;  // URLs like PrefillNode::url
  ServerConfig http;                // where and how to listen; API keys are unused: the nodes check them
  std::string api_key;              // sent with the router's own requests to nodes; empty: none
  double health_check_seconds = 1;  // interval between health checks of a node
  // Limits for a node's responses. A request that exceeds one fails; other requests are not affected.
  double health_timeout_seconds = 5;  // for the response to a health check
  // Seconds until the response is complete, or until a stream begins; 0: no limit
  double request_timeout_seconds = 1800;
  double quiet_timeout_seconds = 60;       // between two pieces of a response that has begun; 0: no limit
  int64_t max_response_bytes = 256 << 20;  // bytes of one response that is not a stream
  int64_t max_held_bytes = 1 << 30;        // total response bytes that the router has not forwarded yet
};

// Serves from make() until stop(). A generation request goes to the decode node with the fewest active
// requests, together with the address of the prefill node with the fewest; the response is forwarded as it
// arrives. An unreachable node gets no requests until it responds again.
class Router {
 public:
  // kInvalidArgument: the node list is empty, a URL is malformed, or a limit is out of range; other errors
  // are those of Server::make().
  static Result<std::unique_ptr<Router>> make(RouterConfig config);
  virtual ~Router() = default;  // stops

  virtual int port() const = 0;
  // Whether at least one prefill node and one decode node are up.
  virtual bool is_ready() const = 0;
  // Refuses new requests with 503; returns when the active ones have finished, or at the deadline (infinity:
  // none).
  virtual void drain(double timeout_seconds) = 0;
  // Closes all connections.
  virtual void stop() = 0;
};

}  // namespace fp4moe
