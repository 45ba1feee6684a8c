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
    int bootstrap_port = 0;  // 0: what the node's /server_info says
  };
  std::vector<PrefillNode> prefill;
  std::vector<std::string> decode;  // URLs
  ServerConfig http;                // where and how to listen; keys are the nodes' to check
  std::string api_key;              // for the router's own questions to nodes
  double health_check_seconds = 1;  // between two looks at a node
  // What a node may take; of the requests that are passed on, those that exceed it fail, and others go on.
  double health_timeout_seconds = 5;      // to answer a look
  double request_timeout_seconds = 1800;  // until its answer is whole, of a stream until it begins; 0: any
  double quiet_timeout_seconds = 60;      // between two pieces of an answer that has begun; 0: any
  int64_t max_answer_bytes = 256 << 20;   // of an answer that is not a stream
  int64_t max_held_bytes = 1 << 30;       // of all answers that the router has not passed on yet
};

// Serves from make() until stop(). A generation request goes to the decode node that has the fewest, with the
// address of the prefill node that has the fewest; its answer is passed on as it comes. Nodes that do not
// answer are left out until they do again.
class Router {
 public:
  // kInvalidArgument: no nodes, a malformed URL, or a limit out of range; else as Server::make.
  static Result<std::unique_ptr<Router>> make(RouterConfig config);
  virtual ~Router() = default;  // stops

  virtual int port() const = 0;
  // Whether a prefill node and a decode node answer.
  virtual bool is_ready() const = 0;
  // Refuses new requests with 503, and returns when the others are answered or the time is over.
  virtual void drain(double timeout_seconds) = 0;
  virtual void stop() = 0;
};

}  // namespace fp4moe
